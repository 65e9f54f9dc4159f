"""Small trainers for tests: a random Llama with dropout, a few steps, and a way to kill them."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from milepost.integrations.transformers import MilepostTrainerMixin

VOCABULARY = 32
ARGUMENTS: dict[str, Any] = {
    "use_cpu": True,
    "per_device_train_batch_size": 2,
    "learning_rate": 1e-2,
    "report_to": [],
    "disable_tqdm": True,
}
"""What all trainings here are told."""
EIGHT_STEPS = {**ARGUMENTS, "max_steps": 8, "save_steps": 3, "logging_steps": 2}


class Trainer(MilepostTrainerMixin, transformers.Trainer):  # type: ignore[misc]
    """The Trainer with Milepost's checkpoints."""


class Killed(RuntimeError):
    """The process ended here."""


class KillAt(transformers.TrainerCallback):  # type: ignore[misc]
    """Ends a training after a step, before anything is logged or saved there."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise Killed(f"at step {self.step}")


def tiny_config(**changes: Any) -> Any:
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
        "attention_dropout": 0.1,
    }
    return transformers.LlamaConfig(**{**sizes, **changes})


def tiny_model(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(tiny_config())


def token_data(count: int = 20) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, VOCABULARY, (count, 6), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


def tiny_tokenizer(words: int = VOCABULARY) -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2}
    vocabulary.update({f"w{number}": number for number in range(3, words)})
    inner = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def make(
    out: Path, *, cls: Any = Trainer, model: Any = None, kill_at: int = 0, **options: Any
) -> Any:
    """A trainer of 12 steps that saves every 4th and logs every 3rd; `options` are arguments of
    training, or of the trainer when they begin with `milepost_` or are in `own`."""
    own = {"processing_class", "callbacks", "eval_dataset", "compute_metrics"}
    for_trainer = {k: options.pop(k) for k in [*options] if k in own or k.startswith("milepost_")}
    if kill_at:
        for_trainer["callbacks"] = [*for_trainer.get("callbacks", []), KillAt(kill_at)]
    steps = {"max_steps": 12, "save_steps": 4, "logging_steps": 3}
    return cls(
        model=tiny_model() if model is None else model,
        args=transformers.TrainingArguments(str(out), **{**ARGUMENTS, **steps, **options}),
        train_dataset=token_data(),
        **for_trainer,
    )


def run(trainer: Any, resume: Any = None) -> Any:
    """Train to the end, or until it is killed."""
    with suppress(Killed):
        trainer.train(resume_from_checkpoint=resume)
    return trainer


_OF_THE_CLOCK = ("train_runtime", "train_samples_per_second", "train_steps_per_second")


def history(trainer: Any) -> list[dict[str, Any]]:
    """What was logged but for what the clock, or the length of the last call, decides."""
    last = (*_OF_THE_CLOCK, "train_loss")
    return [
        {
            key: value
            for key, value in entry.items()
            if key not in last and "_per_" not in key and not key.endswith("_runtime")
        }
        for entry in trainer.state.log_history
    ]


def bits(model: nn.Module) -> str:
    """A digest of the weights, whole ones in the case of DTensors; collective then."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        digest.update(name.encode())
        digest.update(whole.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def moments(trainer: Any) -> str:
    """A digest of the optimizer's state, whole tensors in the case of DTensors; collective then."""
    digest = hashlib.sha256()
    for group in trainer.optimizer.param_groups:
        for param in group["params"]:
            for slot, value in sorted(trainer.optimizer.state[param].items()):
                whole = value.full_tensor() if hasattr(value, "full_tensor") else value
                digest.update(slot.encode())
                raw = torch.as_tensor(whole).detach().contiguous().flatten().view(torch.uint8)
                digest.update(raw.numpy().tobytes())
    return digest.hexdigest()


def outcome(trainer: Any) -> tuple[list[dict[str, Any]], str, str]:
    """What two trainings that are the same agree on: logs, weights and moments."""
    return history(trainer), bits(trainer.model), moments(trainer)


def names(path: Path) -> set[str]:
    """The checkpoints of a run."""
    return {entry.name for entry in path.iterdir() if entry.name.startswith("checkpoint-")}


# What the stock Trainer writes beside the weights, or accelerate in their place.
_STOCK = (
    "*.pt",
    "*.pth",
    "*.distcp",
    "optimizer.bin",
    "optimizer_[0-9]*",
    "rng_state*",
    "training_args.bin",
    "pytorch_model*",
)


def stock_files(path: Path) -> list[str]:
    """What lies in a checkpoint that the stock Trainer, or accelerate for it, wrote."""
    entries = [*path.rglob("*")]
    assert entries, f"{path} is empty"
    return [each.name for each in entries if any(fnmatch(each.name, name) for name in _STOCK)]


# ---- several ranks

DDP: dict[str, Any] = {"ddp_backend": "gloo"}
FSDP: dict[str, Any] = {
    "fsdp": True,
    "fsdp_config": {"version": 2, "state_dict_type": "SHARDED_STATE_DICT"},
}


def quiet(*modules: str) -> None:
    """On a rank, where pytest's filters are not: warnings are errors, but those of `modules`."""
    warnings.filterwarnings("error")
    texts = ("pin_memory", "returned a view tensor", "sequential all_gather", "OMP_NUM_THREADS")
    for text in texts:
        warnings.filterwarnings("ignore", f".*{text}.*")
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", category=FutureWarning)
    for name in modules:
        warnings.filterwarnings("ignore", module=name)


@contextmanager
def real_fsdp2() -> Iterator[None]:
    """Stock accelerate runs DDP on a CPU where FSDP is asked for; say that this is FSDP."""
    from accelerate import DistributedType
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import FullyShardedDataParallelPlugin

    before = transformers.Trainer.create_accelerator_and_postprocess

    def create(self: Any) -> None:
        before(self)
        state = self.accelerator.state
        if getattr(state, "fsdp_plugin", None) is None:
            state.fsdp_plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
        for shared in (PartialState, AcceleratorState):
            shared._shared_state["distributed_type"] = DistributedType.FSDP
        self.is_fsdp_enabled = True

    transformers.Trainer.create_accelerator_and_postprocess = create
    try:
        yield
    finally:
        transformers.Trainer.create_accelerator_and_postprocess = before


def is_sharded(trainer: Any) -> bool:
    """Whether every parameter is a DTensor."""
    return {type(param).__name__ for param in trainer.model.parameters()} == {"DTensor"}
