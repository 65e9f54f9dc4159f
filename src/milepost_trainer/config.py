"""The YAML of a run: every key with its type, default and meaning; parsed strictly."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import yaml
from msgspec import Meta

from milepost_trainer.lora_settings import LoraSettings

Positive = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]
Rate = Annotated[float, Meta(gt=0)]

TaskName = Literal[
    "pretrain", "sft", "dpo", "kto", "sdpg", "reward", "classification", "value", "embedding"
]

MESH_KEYS = (
    *("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size"),
    *("ep_size", "expert_tp_size", "pipeline_parallel_size"),
)
_KEYS_OF_TASKS = {
    "packing": ("sft",),
    "beta": ("dpo", "kto", "sdpg"),
    "label_smoothing": ("dpo",),
    "desirable_weight": ("kto",),
    "undesirable_weight": ("kto",),
    "num_labels": ("classification",),
    "similarity_scale": ("embedding",),
    "precompute_reference_logps": ("dpo", "kto", "sdpg"),
}
_WITHOUT_PIPELINE = (
    "the last stage of a pipeline computes the loss of a language model on single rows, one "
    "microbatch after the other, and no other loss"
)


class ConfigError(Exception):
    """A YAML that cannot be run; the message says which key, what was expected and found."""


class TrainerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One training run. Sizes of the mesh multiply to the number of processes; experts share it."""

    # what is trained: a directory of `from_pretrained`, or a config for random weights
    model_name_or_path: str | None = None
    model_config: dict[str, Any] | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    use_grouped_gemm: bool | None = None

    # on what
    task: TaskName = "pretrain"
    train_files: Annotated[list[str], Meta(min_length=1)]
    eval_files: Annotated[list[str], Meta(min_length=1)] | None = None
    eval_steps: Positive | None = None
    max_seq_length: Annotated[int, Meta(ge=2)] = 128
    packing: bool = False
    global_batch_size: Positive = 8
    microbatches: Positive | None = None
    seed: Natural = 0

    # the loss of some tasks
    beta: Annotated[float, Meta(gt=0)] | None = None
    label_smoothing: Annotated[float, Meta(ge=0, lt=0.5)] = 0.0
    desirable_weight: Annotated[float, Meta(gt=0)] = 1.0
    undesirable_weight: Annotated[float, Meta(gt=0)] = 1.0
    num_labels: Annotated[int, Meta(ge=2)] | None = None
    similarity_scale: Annotated[float, Meta(gt=0)] = 20.0
    precompute_reference_logps: bool = False

    # how
    max_steps: Positive
    optimizer: Literal["adamw", "sgd", "muon", "adafactor"] = "adamw"
    learning_rate: Rate = 3e-4
    weight_decay: Annotated[float, Meta(ge=0)] = 0.0
    momentum: Annotated[float, Meta(ge=0, lt=1)] = 0.9
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: Natural = 0
    max_grad_norm: Annotated[float, Meta(gt=0)] | None = 1.0
    moe_balancing: Literal["none", "bias_update", "bias_update_transient"] = "none"
    moe_bias_update_rate: Rate = 1e-3

    # what of it
    lora: LoraSettings | None = None
    sinks: Literal["live", "trainable", "neutralized"] | None = None
    reset_sinks: bool = False

    # on how many processes
    dp_replicate_size: Positive = 1
    dp_shard_size: Positive = 1
    tp_size: Positive = 1
    cp_size: Positive = 1
    ep_size: Positive = 1
    expert_tp_size: Positive = 1
    pipeline_parallel_size: Positive = 1
    pipeline_schedule: Literal["gpipe", "1f1b", "interleaved"] = "1f1b"

    # checkpoints
    output_dir: str
    save_steps: Positive | None = None
    save_total_limit: Positive | None = None
    save_max_shard_size: str | Positive = "5GB"
    save_only_model: bool = False
    merge_expert_lora_on_save: bool = False
    resume_from_checkpoint: bool | str = False
    allow_optimizer_warm_restart: bool = False
    overwrite_output_dir: bool = False
    logging_steps: Positive = 10
    metric_for_best_model: str | None = None
    greater_is_better: bool | None = None
    load_best_model_at_end: bool = False

    def __post_init__(self) -> None:
        given = [self.model_name_or_path is not None, self.model_config is not None]
        if sum(given) != 1:
            raise ValueError("give either model_name_or_path or model_config, and not both")
        if self.model_config is not None and not isinstance(
            self.model_config.get("model_type"), str
        ):
            raise ValueError("model_config needs model_type, such as llama or qwen3_moe")
        if self.microbatches is not None and self.pipeline_parallel_size == 1:
            raise ValueError("microbatches is about pipelines; set pipeline_parallel_size too")
        self._check_batch()
        self._check_task()
        self._check_evaluation()
        self._check_adapters()
        if self.use_grouped_gemm is False and self.ep_size * self.expert_tp_size > 1:
            raise ValueError(
                "use_grouped_gemm: false computes one expert after the other, which ep_size and "
                "expert_tp_size do not; leave it out, or set it to true"
            )
        if self.allow_optimizer_warm_restart and self.resume_from_checkpoint is False:
            raise ValueError(
                "allow_optimizer_warm_restart is about a resume; set resume_from_checkpoint too"
            )

    def _check_batch(self) -> None:
        width = self.dp_replicate_size * self.dp_shard_size
        rows, left = divmod(self.global_batch_size, width)
        if left:
            raise ValueError(
                f"global_batch_size {self.global_batch_size} cannot be cut into equal slices for "
                f"{width} data-parallel ranks (dp_replicate_size times dp_shard_size)"
            )
        if rows % self.microbatches_per_step:
            raise ValueError(
                f"the {rows} rows of a rank (global_batch_size {self.global_batch_size} over "
                f"{width} data-parallel ranks) cannot be cut into {self.microbatches_per_step} "
                "microbatches; change microbatches (two for each pipeline rank when left out)"
            )

    def _check_task(self) -> None:
        for field in msgspec.structs.fields(TrainerConfig):
            tasks = _KEYS_OF_TASKS.get(field.name)
            is_given = getattr(self, field.name) != field.default
            if tasks is not None and is_given and self.task not in tasks:
                raise ValueError(
                    f"{field.name} is about task {' and '.join(tasks)}; leave it out of task "
                    f"{self.task}"
                )
        if self.task == "classification" and self.num_labels is None:
            raise ValueError("task classification needs num_labels, how many classes there are")
        if self.pipeline_parallel_size > 1 and self.task not in ("pretrain", "sft"):
            raise ValueError(
                f"task {self.task} cannot run with pipeline_parallel_size: {_WITHOUT_PIPELINE}; "
                "use dp_shard_size, tp_size, cp_size or ep_size"
            )
        if self.packing and self.cp_size * self.pipeline_parallel_size > 1:
            raise ValueError(
                "packing needs attention that stops where a text ends, which cp_size and "
                "pipeline_parallel_size do not have; use dp_shard_size, tp_size or ep_size"
            )
        if self.global_batch_size == 1 and self.task == "embedding":
            raise ValueError(
                "task embedding tells the positive of an anchor from those of the other rows; set "
                "global_batch_size to more than 1"
            )

    def _check_evaluation(self) -> None:
        if self.eval_files is None and self.eval_steps is not None:
            raise ValueError("eval_steps is about eval_files; set these too")
        if self.greater_is_better is not None and self.metric_for_best_model is None:
            raise ValueError("greater_is_better is about metric_for_best_model; set that too")
        if not self.best_metric.startswith("eval_"):
            return
        if self.eval_files is None:
            raise ValueError(
                f"metric_for_best_model: {self.best_metric} is measured on eval_files; set these"
            )
        every = self.eval_every
        if self.save_steps is not None and every is not None and self.save_steps % every:
            raise ValueError(
                f"save_steps {self.save_steps} is no multiple of eval_steps {every}, so that some "
                f"checkpoints would have no {self.best_metric}; change one of them"
            )

    def _check_adapters(self) -> None:
        if self.merge_expert_lora_on_save and self.lora is None:
            raise ValueError("merge_expert_lora_on_save is about adapters; set lora too")
        if self.reset_sinks and self.sinks not in (None, "neutralized"):
            raise ValueError(f"reset_sinks puts the sinks out, and sinks: {self.sinks} does not")
        if self.lora is None:
            return
        if self.lora.expert_projections and self.use_grouped_gemm is False:
            raise ValueError("lora.expert_projections are computed in groups: no use_grouped_gemm")
        if self.lora.target_parameters and self.use_grouped_gemm is False and self.tp_size > 1:
            raise ValueError(
                "lora.target_parameters are computed in groups with tp_size: no use_grouped_gemm"
            )
        if self.lora.quantized and self.model_config is not None:
            raise ValueError("load_in_4bit and load_in_8bit are about a model_name_or_path")
        if self.lora.quantized and self.merge_expert_lora_on_save:
            raise ValueError(
                "merge_expert_lora_on_save: a base in 4 or 8 bit has no weights to merge into; "
                "merge the adapter into the base of full precision after training"
            )

    @property
    def beta_or_default(self) -> float:
        """How strongly a policy is held to its reference."""
        return 0.1 if self.beta is None else self.beta

    @property
    def eval_every(self) -> int | None:
        """Steps from one evaluation to the next, as often as saves unless said otherwise; None: at
        the end only."""
        return self.eval_steps or self.save_steps

    @property
    def best_metric(self) -> str:
        """By which number a checkpoint is the best: the loss, on `eval_files` if there are any."""
        return self.metric_for_best_model or ("loss" if self.eval_files is None else "eval_loss")

    @property
    def more_is_better(self) -> bool:
        """Of `best_metric`: less of a loss, more of anything else, unless the YAML says so."""
        if self.greater_is_better is not None:
            return self.greater_is_better
        return not self.best_metric.endswith("loss")

    @property
    def microbatches_per_step(self) -> int:
        """Pieces of a rank's batch that run through the pipeline one after the other."""
        stages = self.pipeline_parallel_size
        return self.microbatches or (2 * stages if stages > 1 else 1)

    @property
    def base(self) -> Path | dict[str, Any]:
        """Where the weights come from: a directory, or a config for random ones."""
        if self.model_config is not None:
            return dict(self.model_config)
        return Path(str(self.model_name_or_path))

    def mesh_sizes(self) -> dict[str, int]:
        """The sizes of the mesh by key."""
        return {key: getattr(self, key) for key in MESH_KEYS}


def parse_config(text: str, where: str) -> TrainerConfig:
    """Check and convert a YAML document; `ConfigError` names the key."""
    try:
        document = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: not YAML: {error}") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{where}: expected keys and values, found {type(document).__name__}")
    _refuse_unknown(document, TrainerConfig, where)
    if isinstance(document.get("lora"), dict):
        _refuse_unknown(document["lora"], LoraSettings, f"{where}: lora")
    try:
        return msgspec.convert(document, TrainerConfig)
    except msgspec.ValidationError as error:
        what, _, key = str(error).partition(" - at `$.")
        place = f"{where}: {key.rstrip('`')}" if key else where
        raise ConfigError(f"{place}: {what[:1].lower()}{what[1:]}") from error


def read_config(path: Path) -> TrainerConfig:
    """The run that the file at `path` describes."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    return parse_config(text, str(path))


class _Loader(yaml.SafeLoader):
    """Plain values only; `3e-4` is a number, as everybody expects, and no key comes twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        for key, _ in node.value:
            if keys.count(key.value) > 1:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value} comes twice", key.start_mark
                )
        return super().construct_mapping(node, deep=deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def _refuse_unknown(
    document: dict[Any, Any], kind: type[TrainerConfig | LoraSettings], where: str
) -> None:
    known = [field.name for field in msgspec.structs.fields(kind)]
    for key in document:
        if key in known:
            continue
        near = difflib.get_close_matches(str(key), known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"{where}: unknown key {key!r}{hint}")
