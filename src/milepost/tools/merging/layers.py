"""Which tensors of the models make which tensor of the output: by name, or layer by layer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from milepost.errors import InvalidInputError
from milepost.tools.merging.parameters import Setting
from milepost.tools.merging.recipe import Recipe
from milepost.tools.merging.vocabulary import is_by_token
from milepost.tools.rewrite.problems import Problems
from milepost.tools.rewrite.source import Source, SourceTensor

_LAYER = re.compile(r"^((?:.*\.)?(?:layers|layer|h|blocks|block)\.)(\d+)(\..*)$")

_PER_LAYER = re.compile(
    r"(?:mlp_)?layer_types|layers_block_type|indexer_types|no_rope_layers|layer_rope_theta"
    r"|\w+_per_layer|sliding_windows|activation_sparsity_pattern|intermediate_size|block_configs"
    r"|attn_layers|attention_layers|compress_ratios|ffn_multipliers"
    r"|num_(?:query|kv|attention|key_value)_heads"
)
"""Lists of a configuration that have an entry for each layer."""
_LAYER_NUMBERS = frozenset({"full_attn_idxs", "mlp_only_layers", "moe_layers"})
"""Lists of a configuration that number layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """One tensor of the output, and what it is made of.

    `depth` is 0 at the first layer and outside of the layers, 1 at the last. `shared` and `each`
    are levels of knobs, the nearest first.
    """

    name: str
    tensors: Sequence[SourceTensor]
    base: SourceTensor | None
    depth: float
    shared: Sequence[Mapping[str, Setting]]
    each: Sequence[Sequence[Mapping[str, Setting]]]


def layer_of(name: str) -> tuple[str, int, str] | None:
    """A name cut at its layer number; None outside the layers."""
    found = _LAYER.match(name)
    return None if found is None else (found[1], int(found[2]), found[3])


def layer_count(source: Source) -> int:
    """One more than the highest layer number."""
    numbers = [cut[1] for name in source.tensors if (cut := layer_of(name)) is not None]
    return max(numbers, default=-1) + 1


def set_layers(config: dict[str, Any], layers: Sequence[int]) -> list[str]:
    """Make `config` that of a model whose layers are these of its own, and tell what has changed.

    Lists that are known to have an entry for each layer, or to number layers, follow them. Others
    that only have as many entries (`eos_token_id`) stay.
    """
    before = config.get("num_hidden_layers")
    config["num_hidden_layers"] = len(layers)
    for key, value in list(config.items()):
        if not isinstance(value, list):
            continue
        if key in _LAYER_NUMBERS:
            config[key] = [place for place, layer in enumerate(layers) if layer in value]
        elif _PER_LAYER.fullmatch(key) and len(value) == before:
            config[key] = [value[layer] for layer in layers]
    return [f"num_hidden_layers: {before} became {len(layers)}"]


class Planner:
    """Goes through a recipe; what models lack, or have in another shape, becomes problems."""

    def __init__(self, recipe: Recipe, sources: Mapping[str, Source], problems: Problems) -> None:
        self._recipe, self._sources, self._problems = recipe, sources, problems
        self._bases = None if recipe.base is None else sources[str(recipe.base)]

    def plan(self) -> Iterator[Wanted]:
        """All tensors of the output, in order; nothing for those with problems."""
        if self._recipe.whole:
            yield from self._whole()
            return
        last = len(self._recipe.slices) - 1
        total, done = sum(end - first for first, end in map(self.span, range(last + 1))), 0
        yield from self._outside(0, before=True)
        for number in range(last + 1):
            first, end = self.span(number)
            yield from self._layers(number, first, end, done, total)
            done += end - first
        yield from self._outside(last, before=False)

    def _source(self, number: int, place: int) -> Source:
        return self._sources[str(self._recipe.slices[number].ingredients[place].path)]

    def span(self, number: int) -> tuple[int, int]:
        """The layers of the first ingredient; those of the others are as many."""
        each = self._recipe.slices[number]
        spans = [
            ingredient.layers or (0, layer_count(self._sources[str(ingredient.path)]))
            for ingredient in each.ingredients
        ]
        for (first, end), ingredient in zip(spans, each.ingredients, strict=True):
            count = layer_count(self._sources[str(ingredient.path)])
            if end > count:
                raise InvalidInputError(
                    f"slices[{number}]: {ingredient.path} has {count} layers, and [{first}, {end}] "
                    "was asked for"
                )
        if len({end - first for first, end in spans}) > 1:
            raise InvalidInputError(
                f"slices[{number}]: its models give different numbers of layers: {spans}"
            )
        return spans[0]

    def _whole(self) -> Iterator[Wanted]:
        every = [self._sources[str(path)] for path in self._recipe.paths()]
        names = dict.fromkeys(name for source in every for name in source.tensors)
        count = max(layer_count(source) for source in every)
        for name in names:
            cut = layer_of(name)
            depth = 0.0 if cut is None else _depth(cut[1], count)
            yield from self._wanted(0, name, depth, lambda place, name=name: name)

    def _outside(self, number: int, *, before: bool) -> Iterator[Wanted]:
        """Tensors outside the layers, before them (embeddings) or behind them."""
        for name in self._source(number, 0).tensors:
            if layer_of(name) is None and _is_before(name) == before:
                yield from self._wanted(number, name, 0.0, lambda place, name=name: name)

    def _layers(self, number: int, first: int, end: int, done: int, total: int) -> Iterator[Wanted]:
        each = self._recipe.slices[number]
        starts = [(ingredient.layers or (0, 0))[0] for ingredient in each.ingredients]
        for step in range(end - first):
            for name in self._source(number, 0).tensors:
                cut = layer_of(name)
                if cut is None or cut[1] != first + step:
                    continue
                head, _, tail = cut

                def own(place: int, head: str = head, tail: str = tail, step: int = step) -> str:
                    return f"{head}{starts[place] + step}{tail}"

                yield from self._wanted(
                    number,
                    f"{head}{done + step}{tail}",
                    _depth(done + step, total),
                    own,
                )

    def _wanted(self, number: int, name: str, depth: float, own: object) -> Iterator[Wanted]:
        assert callable(own)
        each = self._recipe.slices[number]
        found: list[SourceTensor] = []
        for place, ingredient in enumerate(each.ingredients):
            tensor = self._tensor(self._sources[str(ingredient.path)], own(place))
            if tensor is not None:
                found.append(tensor)
        base = None
        if self._bases is not None:
            base = self._tensor(self._bases, own(0))
        complete = len(found) == len(each.ingredients) and (base is not None or self._bases is None)
        if complete and self._agree(name, [*found, *([base] if base is not None else [])]):
            yield Wanted(
                name=name,
                tensors=found,
                base=base,
                depth=depth,
                shared=[each.parameters, self._recipe.parameters],
                each=[[ingredient.parameters] for ingredient in each.ingredients],
            )

    def _tensor(self, source: Source, name: str) -> SourceTensor | None:
        """The tensor, or the one that it is tied to; a problem when there is none."""
        kept = source.tied.get(name, name)
        if kept not in source.tensors:
            kept = _untied(source, name) or kept
        if kept in source.tensors:
            return source.tensors[kept]
        self._problems.refuse(f"{source.path}: has no tensor {name}, which other models have")
        return None

    def _agree(self, name: str, tensors: Sequence[SourceTensor]) -> bool:
        """Whether shapes are the same, but for the rows of embeddings, and all are of one kind."""
        first = tensors[0]
        for other in tensors[1:]:
            rows_differ = is_by_token(name) and first.shape[1:] == other.shape[1:]
            if first.shape != other.shape and not rows_differ:
                self._problems.refuse(
                    f"{name}: shape {list(first.shape)} in {first.source.path}, "
                    f"{list(other.shape)} in {other.source.path}"
                )
                return False
        return True


def _untied(source: Source, name: str) -> str | None:
    """The input embedding, for a head that the model's config says is tied to it."""
    tied = source.text_config.get("tie_word_embeddings", source.config.get("tie_word_embeddings"))
    if not tied or not name.endswith("lm_head.weight"):
        return None
    return next((n for n in source.tensors if n.endswith("embed_tokens.weight")), None)


def _depth(number: int, count: int) -> float:
    return number / (count - 1) if count > 1 else 0.0


def _is_before(name: str) -> bool:
    return is_by_token(name) and not name.endswith(("lm_head.weight", "embed_out.weight"))
