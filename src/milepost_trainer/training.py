"""One training run: build, resume, steps, saves. `train` is what every rank calls."""

from __future__ import annotations

import difflib
import logging
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig

import milepost as mp
from milepost_trainer.balancing import SIDECAR, RouterBalancing
from milepost_trainer.batches import GlobalBatches
from milepost_trainer.config import ConfigError, TrainerConfig
from milepost_trainer.optimizers import build_optimizers, build_schedulers
from milepost_trainer.parallel import MeshSizes, ParallelModel, PipelineSchedule, build
from milepost_trainer.samples import read_samples
from milepost_trainer.tokens import tokenizer_for

logger = logging.getLogger(__name__)


def train(config: TrainerConfig) -> None:
    """Train to `max_steps`. Collective: each process of the job calls it with the same config.

    `ConfigError` for what the YAML asks and cannot be had; errors of `milepost` as they are.
    """
    resume = _resume_from(config)
    run = Run(config)
    save = _save_policy(config)
    keep = None if config.save_total_limit is None else mp.KeepLast(config.save_total_limit)
    with mp.CheckpointManager(config.output_dir, save=save, keep=keep, resume=resume) as manager:
        step = run.resume(manager)
        while step < config.max_steps and not manager.stop_requested:
            step += 1
            loss = run.step(step, manager)
            if manager.should_save(step) or step == config.max_steps:
                run.save(step, manager, loss)


class Run:
    """Everything that a training consists of; its state is what a checkpoint holds."""

    def __init__(self, config: TrainerConfig) -> None:
        self.config = config
        self.tokenizer = tokenizer_for(config.base)
        samples = read_samples(
            config.task, config.train_files, self.tokenizer, config.max_seq_length
        )
        self.model = build_model(config, len(self.tokenizer))
        self.batches = GlobalBatches(
            samples,
            batch_size=config.global_batch_size,
            seed=config.seed,
            data_rank=self.model.data_rank,
            data_world=self.model.data_world,
        )
        self.optimizers = build_optimizers(config, list(self.model.named_parameters()))
        self.schedulers = build_schedulers(config, self.optimizers)
        self.balancing: RouterBalancing | None = None
        if config.moe_balancing != "none":
            self.balancing = RouterBalancing(
                config.moe_balancing, config.moe_bias_update_rate, self.model.modules
            )
        self._since = time.monotonic()
        for note in samples.notes:
            logger.info("%s", note)
        logger.info("%d samples, mesh: %s", len(samples), self.model.sizes)

    # ---- a step

    def step(self, step: int, manager: mp.CheckpointManager) -> float:
        """Forward, backward, update; the mean loss over the global batch."""
        loss = self.model.train_step(self.batches.next())
        norm = None
        if self.config.max_grad_norm is not None:
            norm = self.model.clip_grad_norm_(self.config.max_grad_norm)
        for optimizer in self.optimizers.values():
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        rate = self._rate()
        for scheduler in self.schedulers.values():
            scheduler.step()
        if self.balancing is not None:
            self.balancing.update()
        if step % self.config.logging_steps == 0:
            self._log(step, manager, loss, rate, norm)
        return loss

    def _log(
        self, step: int, manager: mp.CheckpointManager, loss: float, rate: float, norm: float | None
    ) -> None:
        seconds, self._since = time.monotonic() - self._since, time.monotonic()
        manager.log(step, {"loss": loss, "learning_rate": rate}, epoch=self.batches.epoch)
        logger.info(
            "step %d/%d  loss %.4f  lr %.2e%s  epoch %.2f  %.2f s",
            *(step, self.config.max_steps, loss, rate),
            "" if norm is None else f"  norm {norm:.3f}",
            *(self.batches.epoch, seconds),
        )

    def _rate(self) -> float:
        return float(next(iter(self.optimizers.values())).param_groups[0]["lr"])

    # ---- checkpoints

    def state(self) -> dict[str, Any]:
        """What `milepost` saves and fills."""
        return {
            "model": self.model.model,
            **self.optimizers,
            **self.schedulers,
            "data": self.batches,
        }

    def state_without_optimizers(self) -> dict[str, Any]:
        return {key: value for key, value in self.state().items() if key not in self.optimizers}

    def save(self, step: int, manager: mp.CheckpointManager, loss: float) -> None:
        """A checkpoint of this step, complete for `from_pretrained`."""
        only_model = self.config.save_only_model
        report = manager.save(
            step,
            self.state_without_optimizers() if only_model else self.state(),
            metrics={"loss": loss},
            epoch=self.batches.epoch,
            processing_class=self.tokenizer,
            rng=mp.Rng.LEAVE_OUT if only_model else mp.Rng.INCLUDE,
            max_shard_size=self.config.save_max_shard_size,
            sidecars={} if self.balancing is None else {SIDECAR: self.balancing.sidecar()},
        )
        for note in report.notes:
            logger.info("%s", note)
        seconds = sum(report.phases.values())
        logger.info("saved %s: %.1f MB in %.2f s", report.path, report.nbytes / 1e6, seconds)

    def resume(self, manager: mp.CheckpointManager) -> int:
        """Go on from what the manager finds; the step that is done, 0 for a fresh run."""
        report = self._load(manager)
        if report is None:
            logger.info("a fresh run in %s", manager.directory)
            return 0
        for line in report.lines():
            logger.info("%s", line)
        self.batches.check()
        for key, optimizer in self.optimizers.items():
            rates = self.schedulers[key.replace("optimizer", "scheduler")].get_last_lr()
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate  # with fresh moments, the schedule alone knows it
        if self.balancing is not None:
            self.balancing.restore(report.path)
        step = report.step or 0
        self._restore_random(report, step)
        return step

    def _load(self, manager: mp.CheckpointManager) -> mp.LoadReport | None:
        try:
            return manager.resume(self.state(), rng=mp.RngRestore.LATER)
        except (mp.errors.MismatchError, mp.errors.RankError) as error:  # the latter: of another
            if not self.config.allow_optimizer_warm_restart:
                raise
            logger.warning("%s", error)
            logger.warning("warm restart, as allowed: fresh optimizer state")
            return manager.resume(self.state_without_optimizers(), rng=mp.RngRestore.LATER)

    def _restore_random(self, report: mp.LoadReport, step: int) -> None:
        """The saved random state where each rank holds what it held; else seeds made of the step.

        Ranks that hold the same activations must draw the same numbers, and on another mesh these
        are other ranks: only the mesh knows which.
        """
        if report.level in (mp.Level.EXACT, mp.Level.EXACT_STATE):
            report.restore_rng()
        else:
            self.model.seed_random(self.config.seed + 7919 * (step + 1))


def build_model(config: TrainerConfig, vocabulary: int) -> ParallelModel:
    """The model on its mesh, from a directory or with random weights."""
    source: Any = config.base
    if isinstance(source, Path):
        if not (source / "config.json").is_file():
            raise ConfigError(f"model_name_or_path: {source} is no directory with a config.json")
    else:
        source = _random_config(source, vocabulary)
    try:
        sizes = MeshSizes(
            dp_replicate=config.dp_replicate_size,
            dp_shard=config.dp_shard_size,
            cp=config.cp_size,
            tp=config.tp_size,
            ep=config.ep_size,
            etp=config.expert_tp_size,
            pp=config.pipeline_parallel_size,
        )
        sizes.check_world(dist.get_world_size() if dist.is_initialized() else 1)
        model = build(
            source,
            sizes,
            seed=config.seed,
            schedule=PipelineSchedule(config.pipeline_schedule),
            microbatches=config.microbatches_per_step,
            dtype=getattr(torch, config.dtype),
            device=_device(),
        )
        if config.use_grouped_gemm is not None and config.ep_size * config.expert_tp_size == 1:
            kernel = "grouped_mm" if config.use_grouped_gemm else "eager"
            for module in model.modules:
                inner: Any = getattr(module, "module", module)  # of DDP
                inner.set_experts_implementation(kernel)
        return model
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _device() -> torch.device:
    """A GPU of this machine for each of its ranks, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    rank = dist.get_rank() if dist.is_initialized() else 0
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _random_config(fields: dict[str, Any], vocabulary: int) -> Any:
    fields = {"vocab_size": vocabulary, **fields}
    if fields["vocab_size"] < vocabulary:
        raise ConfigError(
            f"model_config.vocab_size: {fields['vocab_size']} is less than the {vocabulary} tokens "
            "of the byte-level tokenizer; leave it out, or make it larger"
        )
    model_type = fields.pop("model_type")
    try:
        default = AutoConfig.for_model(model_type)
        known = {*default.to_dict(), *default.attribute_map, "attn_implementation"}
        for name in fields.keys() - known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
            if near:  # others may be known to the model alone, such as head_dim of qwen3_moe
                raise ConfigError(
                    f"model_config: {model_type} has no field {name!r}; did you mean {near[0]}?"
                )
        return AutoConfig.for_model(model_type, **fields)
    except (ValueError, StrictDataclassError) as error:
        raise ConfigError(f"model_config: {error}") from error


def _save_policy(config: TrainerConfig) -> mp.SavePolicy:
    if config.save_steps is None:
        return mp.OnSignal()
    return mp.AnyOf(mp.EveryNSteps(config.save_steps), mp.OnSignal())


def _resume_from(config: TrainerConfig) -> mp.Resume | Path:
    match config.resume_from_checkpoint:
        case True:
            return mp.Resume.AUTO
        case False:
            _refuse_a_used_directory(config)
            return mp.Resume.NEVER
        case path:
            return Path(path)


def _refuse_a_used_directory(config: TrainerConfig) -> None:
    output = Path(config.output_dir)
    if config.overwrite_output_dir or not output.is_dir():
        return
    newest = mp.newest(output)
    if newest is not None:
        raise ConfigError(
            f"output_dir: {output} holds {newest.path.name}; set resume_from_checkpoint: true to "
            "go on, or overwrite_output_dir: true to begin again beside it"
        )
