"""Which models a trainer trains, and what its model needs beside the weights.

A model of sentence-transformers is a chain of modules: a transformers model first, whose files lie
at the top of the directory, then pooling, projections and the like, each in a directory of its own.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from milepost.errors import InvalidInputError
from milepost.hf.card import tag_card
from milepost.hf.foreign_calls import attempt
from milepost.hf.live import unwrap
from milepost.state.tensors import is_dtensor

CARD = "README.md"
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")


def is_embedding_model(model: Any) -> bool:
    """Whether a model is a chain of modules of sentence-transformers."""
    return any(
        cls.__module__.startswith("sentence_transformers.") and cls.__name__ == "BaseModel"
        for cls in type(unwrap(model)).__mro__
    )


def models_of(trainer: Any) -> dict[str, Any]:
    """The models of a checkpoint by key, the one at its top as `model`.

    Of sentence-transformers: the transformers model, the modules after it that have tensors, and
    what the loss trains besides. Of TRL: the model, and a reference that follows it; one that does
    not is the base, which is not saved.
    """
    if not is_embedding_model(trainer.model):
        reference = getattr(trainer, "ref_model", None)
        is_moving = getattr(trainer.args, "sync_ref_model", False)
        moving = {"reference": reference} if is_moving and reference is not None else {}
        return {"model": trainer.model, **moving}
    chain = unwrap(trainer.model)
    models: dict[str, Any] = {"model": _backbone(chain)}
    for place, module in _rest(chain):
        if any(True for _ in module.state_dict()):
            models[place] = module
    loss = _own_of_loss(trainer.loss, chain)
    return models if loss is None else {**models, "loss": loss}


def require_averaged(trainer: Any) -> None:
    """`InvalidInputError` where ranks would each train a loss of their own.

    What a loss of sentence-transformers trains besides the model is in no wrapper that averages
    its gradients.
    """
    if trainer.args.world_size == 1 or not is_embedding_model(trainer.model):
        return
    loss = _own_of_loss(trainer.loss, unwrap(trainer.model))
    trained = [] if loss is None else [n for n, p in loss.named_parameters() if p.requires_grad]
    if trained:
        raise InvalidInputError(
            f"{type(trainer).__name__}: the loss trains {', '.join(trained[:3])}, whose gradients "
            f"sentence-transformers does not average over the {trainer.args.world_size} ranks, so "
            "that they would drift apart; train in one process, or with a loss without parameters"
        )


def trained_modules(trainer: Any) -> nn.Module:
    """One module around everything that the optimizer trains."""
    if not is_embedding_model(trainer.model):
        model: nn.Module = trainer.model
        return model
    return nn.ModuleDict(models_of(trainer))


def _backbone(chain: Any) -> nn.Module:
    first = next(iter(chain))
    for name in ("model", "auto_model"):
        found = getattr(first, name, None)
        if isinstance(found, nn.Module) and hasattr(found, "config"):
            return found
    raise InvalidInputError(
        f"{type(chain).__name__}: its first module is a {type(first).__name__}, which holds no "
        "transformers model; train it without MilepostTrainerMixin"
    )


def _rest(chain: Any) -> list[tuple[str, nn.Module]]:
    """The modules after the first, with the directories that they are saved to."""
    numbered = list(enumerate(chain))[1:]
    return [(f"{type(module).__name__}_{number}", module) for number, module in numbered]


def _own_of_loss(loss: Any, chain: nn.Module) -> nn.Module | None:
    """A module with the tensors of a loss that are not the model's; None when it has none."""
    known = {id(tensor) for tensor in (*chain.parameters(), *chain.buffers())}
    losses = nn.ModuleDict(loss) if isinstance(loss, dict) else loss
    own = nn.Module()
    for name, param in losses.named_parameters():
        if id(param) not in known:
            place, last = _place(own, name)
            place.register_parameter(last, param)
    for name, buffer in losses.named_buffers():
        if id(buffer) not in known:
            place, last = _place(own, name)
            place.register_buffer(last, buffer)
    return own if own.state_dict() else None


def _place(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The inner module that a dotted name leads to, made when it is missing."""
    *path, last = name.split(".")
    for part in path:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        inner = module._modules[part]
        assert inner is not None, "it was made here"
        module = inner
    return module, last


def write_model_card(trainer: Any) -> None:
    """Keep the card of the whole run up to date beside its checkpoints, as TRL does at a save."""
    for cls in type(trainer).__mro__:
        if cls.__module__.startswith("trl.") and "_save_checkpoint" in vars(cls):
            name = trainer.args.hub_model_id or trainer.args.output_dir
            trainer.create_model_card(model_name=Path(name).name)
            return


def side_documents(trainer: Any) -> dict[str, bytes]:
    """Files that sentence-transformers reads besides weights and configuration, by name.

    Empty for other models, and on ranks that do not write them.
    """
    if not is_embedding_model(trainer.model) or not trainer.is_world_process_zero():
        return {}
    chain = unwrap(trainer.model)
    first, rest = next(iter(chain)), _rest(chain)
    names = [name for name, _ in chain.named_children()]
    places = ["", *(place for place, _ in rest)]
    entries = [
        _module_entry(chain, number, name, module, place)
        for number, (name, module, place) in enumerate(zip(names, chain, places, strict=True))
    ]
    files = {
        "modules.json": _json(entries),
        "config_sentence_transformers.json": _json(chain._get_model_config()),
        **_written_by(first.save_config),
    }
    for place, module in rest:
        with _weights_left_out(module):
            written = _written_by(module.save)
        files.update({f"{place}/{name}": data for name, data in written.items()})
    return files | _card(chain)


def _module_entry(
    chain: Any, number: int, name: str, module: nn.Module, place: str
) -> dict[str, Any]:
    kind = f"{type(module).__module__}.{type(module).__name__}"
    if kind.startswith("transformers_modules."):
        raise InvalidInputError(
            f"{type(chain).__name__}: the module {name} is remote code ({kind}), which Milepost "
            "does not copy; train it without MilepostTrainerMixin"
        )
    entry: dict[str, Any] = {"idx": number, "name": name, "path": place, "type": kind}
    kwargs = (getattr(chain, "module_kwargs", None) or {}).get(name)
    return {**entry, "kwargs": kwargs} if kwargs else entry


def _written_by(save: Any) -> dict[str, bytes]:
    """What `save(directory)` writes, weights left out, by way of a private directory."""
    with tempfile.TemporaryDirectory(prefix="milepost-") as name:
        save(name)
        return {
            path.name: path.read_bytes()
            for path in sorted(Path(name).iterdir())
            if path.is_file() and path.name not in _WEIGHTS
        }


@contextmanager
def _weights_left_out(module: nn.Module) -> Iterator[None]:
    """`save` of a module does not write its weights, which may be shards."""
    parts = [part for part in module.modules() if hasattr(part, "save_torch_weights")]
    for part in parts:
        vars(part)["save_torch_weights"] = lambda *_, **__: None
    try:
        yield
    finally:
        for part in parts:
            del vars(part)["save_torch_weights"]


def _card(chain: Any) -> dict[str, bytes]:
    """The card that sentence-transformers writes, tagged; none when it cannot write one.

    Of a sharded model without scores of its example: all ranks would have to encode it together.
    """
    data = chain.model_card_data
    before = getattr(data, "save_dir", None), data.generate_widget_examples
    if any(is_dtensor(param) for param in chain.parameters()):
        data.generate_widget_examples = False
    files, _ = attempt(partial(_written_by, chain._create_model_card))
    data.save_dir, data.generate_widget_examples = before
    if not files or CARD not in files:
        return {}
    card, _ = attempt(partial(tag_card, files[CARD], where=CARD))
    return {CARD: card if card is not None else files[CARD]}


def _json(document: Any) -> bytes:
    return (json.dumps(document, indent=2, sort_keys=True) + "\n").encode()
