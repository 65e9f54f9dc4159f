"""Would `from_pretrained` find a tensor for every parameter? Answered by names and shapes alone."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

from milepost.hf.foreign_calls import attempt
from milepost.hf.tied_names import declared_ties


@dataclass(frozen=True, slots=True, kw_only=True)
class NameComparison:
    """`missing` are runtime names that no tensor fills, `unexpected` tensors that fill nothing;
    `misfits` say of runtime names how many elements they have and get.

    `model_class` is None, and a note says why, where transformers could not be asked.
    """

    model_class: str | None = None
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    misfits: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def compare_with_class(directory: Path, shapes: Mapping[str, Sequence[int]]) -> NameComparison:
    """Compare the tensors of a directory, shapes by name, with the class its config.json names.

    Of quantised weights, `shapes` are those of the floats that they stand for. The model is built
    on the meta device: no memory, no weights, no code of the checkpoint.
    """
    document, problem = attempt(lambda: json.loads((directory / "config.json").read_bytes()))
    if not isinstance(document, dict):
        return not_compared(f"there is no config.json ({problem})" if problem else "no config.json")
    if find_spec("transformers") is None:
        return not_compared("transformers is not installed")
    model, problem = attempt(partial(on_meta, directory, document))
    if model is None:
        return not_compared(f"transformers cannot build the model: {problem}")
    compared, problem = attempt(partial(_compare, model, shapes))
    return compared if compared is not None else not_compared(str(problem))


def not_compared(why: str) -> NameComparison:
    """Nothing was found, and a note says why nothing was looked for."""
    return NameComparison(notes=(f"names were not compared with the model's class: {why}",))


def on_meta(directory: Path, config: Mapping[str, Any]) -> Any:
    """A model of the class that a `config.json` names, without memory; raises what transformers
    does."""
    import torch
    import transformers

    made = transformers.AutoConfig.from_pretrained(str(directory), local_files_only=True)
    known = [getattr(transformers, str(n), None) for n in config.get("architectures") or ()]
    cls = next((found for found in known if found is not None), None)
    with torch.device("meta"):
        return transformers.AutoModel.from_config(made) if cls is None else cls(made)


def unused_names(
    directory: Path, config: Mapping[str, Any], names: Iterable[str]
) -> frozenset[str]:
    """Those of the stored `names` that the class of `config.json` puts nowhere, whether it declares
    them so or not; none where transformers cannot be asked."""
    found, _ = attempt(partial(_unused, directory, config, list(names)))
    return frozenset(found or ())


def _unused(directory: Path, config: Mapping[str, Any], names: Sequence[str]) -> set[str]:
    model = on_meta(directory, config)
    own = set(model.state_dict())
    return {name for name, found in _loaded(model, names, own).items() if not found & own}


def _loaded(model: Any, names: Iterable[str], own: set[str]) -> Mapping[str, set[str]]:
    """Stored name to the runtime tensors that it fills."""
    from milepost.hf.hub_family import family_of, names_on_load

    family = family_of(model)
    return {n: {n} for n in names} if family is None else names_on_load(family, names, own)


def _compare(model: Any, shapes: Mapping[str, Sequence[int]]) -> NameComparison:
    numels = {name: tensor.numel() for name, tensor in model.state_dict().items()}
    own = set(numels)
    ties = declared_ties(model)
    loaded = _loaded(model, shapes, own)
    filled = {runtime for found in loaded.values() for runtime in found if runtime in own}
    filled |= {alias for alias, source in ties.items() if source in filled}
    filled |= {source for alias, source in ties.items() if alias in filled}
    missing = sorted(own - filled)
    unexpected = sorted(name for name, found in loaded.items() if not found & own)
    return NameComparison(
        model_class=type(model).__name__,
        missing=_without(missing, getattr(model, "_keys_to_ignore_on_load_missing", None)),
        unexpected=_without(unexpected, getattr(model, "_keys_to_ignore_on_load_unexpected", None)),
        misfits=tuple(_misfits(loaded, shapes, numels)),
    )


def _misfits(
    loaded: Mapping[str, set[str]], shapes: Mapping[str, Sequence[int]], numels: Mapping[str, int]
) -> Iterable[str]:
    """Runtime tensors that get another number of elements than they have.

    Several stored tensors may make one, and one several: their elements are counted together.
    Shapes may be turned on the way. What takes part in more than one such group is left out.
    """
    found: Counter[frozenset[str]] = Counter()
    for name, runtime in loaded.items():
        found[frozenset(runtime & numels.keys())] += prod(shapes[name])
    groups = Counter(name for group in found for name in group)
    for group, count in found.items():
        wanted = sum(numels[name] for name in group)
        if group and count != wanted and all(groups[name] == 1 for name in group):
            yield f"{', '.join(sorted(group))}: {count} elements, expected {wanted}"


def _without(names: Iterable[str], patterns: Iterable[str] | None) -> tuple[str, ...]:
    return tuple(n for n in names if not any(re.search(pattern, n) for pattern in patterns or ()))
