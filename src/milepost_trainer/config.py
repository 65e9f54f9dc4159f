"""The YAML of a run: every key with its type, default and meaning; parsed strictly."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import yaml
from msgspec import Meta

Positive = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]
Rate = Annotated[float, Meta(gt=0)]

MESH_KEYS = (
    *("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size"),
    *("ep_size", "expert_tp_size", "pipeline_parallel_size"),
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
    task: Literal["pretrain", "sft"] = "pretrain"
    train_files: Annotated[list[str], Meta(min_length=1)]
    max_seq_length: Annotated[int, Meta(ge=2)] = 128
    global_batch_size: Positive = 8
    microbatches: Positive | None = None
    seed: Natural = 0

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
    resume_from_checkpoint: bool | str = False
    allow_optimizer_warm_restart: bool = False
    overwrite_output_dir: bool = False
    logging_steps: Positive = 10

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
    _refuse_unknown(document, where)
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


def _refuse_unknown(document: dict[Any, Any], where: str) -> None:
    known = [field.name for field in msgspec.structs.fields(TrainerConfig)]
    for key in document:
        if key in known:
            continue
        near = difflib.get_close_matches(str(key), known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"{where}: unknown key {key!r}{hint}")
