"""One training run: build, resume, steps, saves. `train` is what every rank calls."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

import milepost as mp
from milepost_trainer.balancing import SIDECAR, RouterBalancing
from milepost_trainer.batches import GlobalBatches
from milepost_trainer.config import ConfigError, TrainerConfig
from milepost_trainer.models import build_model, checkpoint_to_build_from
from milepost_trainer.optimizers import build_optimizers, build_schedulers
from milepost_trainer.samples import Samples
from milepost_trainer.sinks import SIDECAR as PROVENANCE
from milepost_trainer.sinks import Sinks
from milepost_trainer.tasks import TASKS, Task
from milepost_trainer.tokens import tokenizer_for

BEST = "best-model"
"""Where `load_best_model_at_end` leaves the weights of the best checkpoint."""

logger = logging.getLogger(__name__)


def train(config: TrainerConfig) -> None:
    """Train to `max_steps`. Collective: each process of the job calls it with the same config.

    `ConfigError` for what the YAML asks and cannot be had; errors of `milepost` as they are.
    """
    resume = _resume_from(config)
    save = _save_policy(config)
    keep = None if config.save_total_limit is None else mp.KeepLast(config.save_total_limit)
    best = mp.BestMetric(config.best_metric, _best_mode(config))
    with mp.CheckpointManager(
        config.output_dir, save=save, keep=keep, resume=resume, best=best
    ) as manager:
        run = Run(config, manager)
        step = run.resume(manager)
        while step < config.max_steps and not manager.stop_requested:
            step += 1
            metrics = run.step(step, manager)
            if manager.should_save(step) or step == config.max_steps:
                run.save(step, manager, metrics)
        if config.load_best_model_at_end and step == config.max_steps:
            run.finish(manager)


class Run:
    """Everything that a training consists of; its state is what a checkpoint holds.

    With `manager` the checkpoint that `resume` will load is chosen here: where the rules of a
    resume say so, the model is built from it, and its weights are not read again.
    """

    def __init__(self, config: TrainerConfig, manager: mp.CheckpointManager | None = None) -> None:
        self.config = config
        kind = TASKS[config.task]
        self.tokenizer = tokenizer_for(config.base, needs_pad=kind.needs_pad)
        samples = _read_splits(config, kind, self.tokenizer)
        vocabulary, checkpoint = len(self.tokenizer), None
        if manager is not None:
            checkpoint = manager.checkpoint_to_resume(moments=_moments(config))
        source = checkpoint_to_build_from(config, vocabulary, checkpoint)
        self.model = build_model(config, vocabulary, head=kind.head, checkpoint=source)
        self._weights = mp.Weights.READ if source is None else mp.Weights.ALREADY_READ
        self.sinks = Sinks(config, self.model)
        if checkpoint is not None:
            self.sinks.check(checkpoint)
        self.task = kind(config, self.model, self.tokenizer)
        self.splits = {
            name: GlobalBatches(
                split,
                batch_size=config.global_batch_size,
                seed=config.seed,
                data_rank=self.model.data_rank,
                data_world=self.model.data_world,
            )
            for name, split in samples.items()
        }
        self.batches = self.splits["train"]
        self.optimizers = build_optimizers(config, list(self.model.named_parameters()))
        self.schedulers = build_schedulers(config, self.optimizers)
        self.balancing: RouterBalancing | None = None
        if config.moe_balancing != "none":
            self.balancing = RouterBalancing(
                config.moe_balancing, config.moe_bias_update_rate, self.model.modules
            )
        self._since = time.monotonic()
        for name, split in samples.items():
            for note in split.notes:
                logger.info("%s", note if name == "train" else f"{name}: {note}")
        logger.info("%d samples, mesh: %s", len(samples["train"]), self.model.sizes)

    # ---- a step

    def step(self, step: int, manager: mp.CheckpointManager) -> dict[str, float]:
        """Forward, backward, update, and the evaluation where one is due.

        Returns what was measured: `loss`, the mean over the global batch, more of some tasks, and
        the same of `eval_files` under names that begin with `eval_`.
        """
        metrics = self.task.train_step(self.batches.next())
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
            self._log(step, manager, metrics, rate, norm)
        if "eval" in self.splits and self._is_evaluated(step):
            evaluated = self.evaluate()
            manager.log(step, evaluated, epoch=self.batches.epoch)
            logger.info("step %d  %s", step, _as_text(evaluated))
            metrics = {**metrics, **evaluated}
        return metrics

    def evaluate(self) -> dict[str, float]:
        """The mean of each number of the task over the whole global batches of `eval_files`."""
        seen = [
            self.task.evaluate(batch)
            for batch, count in self.splits["eval"].in_order()
            if count == self.config.global_batch_size
        ]
        return {
            f"eval_{name}": sum(each[name] for each in seen if name in each)
            / sum(name in each for each in seen)
            for name in dict.fromkeys(name for each in seen for name in each)
        }

    def _is_evaluated(self, step: int) -> bool:
        every = self.config.eval_every
        return step == self.config.max_steps or (every is not None and step % every == 0)

    def _log(
        self,
        step: int,
        manager: mp.CheckpointManager,
        metrics: dict[str, float],
        rate: float,
        norm: float | None,
    ) -> None:
        seconds, self._since = time.monotonic() - self._since, time.monotonic()
        manager.log(step, {**metrics, "learning_rate": rate}, epoch=self.batches.epoch)
        more = {name: value for name, value in metrics.items() if name != "loss"}
        logger.info(
            "step %d/%d  loss %.4f  lr %.2e%s%s  epoch %.2f  %.2f s",
            *(step, self.config.max_steps, metrics["loss"], rate),
            "" if norm is None else f"  norm {norm:.3f}",
            f"  {_as_text(more)}" if more else "",
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
            **self.task.state(),
        }

    def state_without_optimizers(self) -> dict[str, Any]:
        return {key: value for key, value in self.state().items() if key not in self.optimizers}

    @property
    def _adapters(self) -> mp.Adapters:
        """Alone, unless the run asks for them folded in, or the task's model is loaded whole."""
        folded = self.config.merge_expert_lora_on_save or self.config.task == "embedding"
        return mp.Adapters.MERGED if folded else mp.Adapters.ALONE

    def _sidecars(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        provenance = self.sinks.record()
        if self.balancing is not None:
            found[SIDECAR] = self.balancing.sidecar()
            provenance["router_balancing"] = self.config.moe_balancing
        if provenance:
            found[PROVENANCE] = json.dumps(provenance, indent=2).encode() + b"\n"
        return found

    def save(self, step: int, manager: mp.CheckpointManager, metrics: dict[str, float]) -> None:
        """A checkpoint of this step, complete for `from_pretrained`."""
        only_model = self.config.save_only_model
        report = manager.save(
            step,
            self.state_without_optimizers() if only_model else self.state(),
            metrics=metrics,
            epoch=self.batches.epoch,
            processing_class=self.tokenizer,
            rng=mp.Rng.LEAVE_OUT if only_model else mp.Rng.INCLUDE,
            max_shard_size=self.config.save_max_shard_size,
            sidecars=self._sidecars(),
            adapters=self._adapters,
            documents={**self.task.model_files(), **self.task.documents()},
        )
        for note in report.notes:
            logger.info("%s", note)
        seconds = sum(report.phases.values())
        logger.info("saved %s: %.1f MB in %.2f s", report.path, report.nbytes / 1e6, seconds)

    def resume(self, manager: mp.CheckpointManager) -> int:
        """Go on from what the manager finds; the step that is done, 0 for a fresh run."""
        report = manager.resume(
            self.state(),
            weights=self._weights,
            rng=mp.RngRestore.LATER,
            moments=_moments(self.config),
        )
        if report is None:
            logger.info("a fresh run in %s", manager.directory)
        else:
            for line in report.lines():
                logger.info("%s", line)
            self.batches.check()
        for line in self.task.prepare(self.splits, None if report is None else report.path):
            logger.info("%s", line)
        if report is None:
            self.model.seed_random(self.config.seed)
            return 0
        if self.balancing is not None:
            self.balancing.restore(report.path)
        step = report.step or 0
        self._restore_random(report, step)
        return step

    def finish(self, manager: mp.CheckpointManager) -> None:
        """Take the weights of the best checkpoint, and leave them as a model of its own."""
        report = manager.load_best({"model": self.model.model})
        logger.info("the best model by %s is that of %s", self.config.best_metric, report.path)
        if self.balancing is not None:
            self.balancing.restore(report.path)
        mp.save(
            manager.directory / BEST,
            {"model": self.model.model},
            step=report.step or 0,
            processing_class=self.tokenizer,
            rng=mp.Rng.LEAVE_OUT,
            max_shard_size=self.config.save_max_shard_size,
            sidecars=self._sidecars(),
            adapters=self._adapters,
            documents=self.task.model_files(),
        )

    def _restore_random(self, report: mp.LoadReport, step: int) -> None:
        """The saved random state where each rank holds what it held; else seeds made of the step.

        Ranks that hold the same activations must draw the same numbers, and on another mesh these
        are other ranks: only the mesh knows which.
        """
        if report.level in (mp.Level.EXACT, mp.Level.EXACT_STATE):
            report.restore_rng()
        else:
            self.model.seed_random(self.config.seed + 7919 * (step + 1))


def _read_splits(config: TrainerConfig, kind: type[Task], tokenizer: Any) -> dict[str, Samples]:
    """The samples to train on and, if there are any, to measure on."""
    files = {"train": config.train_files, "eval": config.eval_files or []}
    samples = {}
    for name, paths in files.items():
        try:
            if paths:
                samples[name] = kind.read(config, paths, tokenizer)
        except ConfigError as error:
            raise ConfigError(f"{name}_files: {error}") from error
    if "eval" in samples and len(samples["eval"]) < config.global_batch_size:
        raise ConfigError(
            f"eval_files: {len(samples['eval'])} samples are less than one batch of "
            f"global_batch_size {config.global_batch_size}"
        )
    return samples


def _save_policy(config: TrainerConfig) -> mp.SavePolicy:
    if config.save_steps is None:
        return mp.OnSignal()
    return mp.AnyOf(mp.EveryNSteps(config.save_steps), mp.OnSignal())


def _moments(config: TrainerConfig) -> mp.Moments:
    if config.allow_optimizer_warm_restart:
        return mp.Moments.FRESH_IF_UNUSABLE
    return mp.Moments.RESTORE


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


def _best_mode(config: TrainerConfig) -> mp.BestMode:
    return mp.BestMode.MAX if config.more_is_better else mp.BestMode.MIN


def _as_text(metrics: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
