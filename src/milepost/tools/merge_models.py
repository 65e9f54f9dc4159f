"""`merge-models`: one model out of several of one architecture."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from milepost.errors import InvalidInputError
from milepost.hf.sidecar_files import SIDECARS
from milepost.storage.fileops import PathLike
from milepost.tools.carried import Carried, carried_files
from milepost.tools.cast import refuse_quantised
from milepost.tools.merge_peft_source import open_with_adapter
from milepost.tools.merging.chunks import Flat, Inputs, flat, longest_numel, rounded
from milepost.tools.merging.layers import Planner, Wanted, set_layers
from milepost.tools.merging.methods import Method
from milepost.tools.merging.parameters import resolve
from milepost.tools.merging.recipe import Recipe
from milepost.tools.merging.vocabulary import (
    TOKENIZER,
    Alignment,
    align,
    is_by_token,
    padded,
    read_vocabulary,
    united,
    vocabulary_of,
)
from milepost.tools.rewrite.cards import Relation, RelationKind, hub_id_of
from milepost.tools.rewrite.dtypes import FLOATS, torch_type
from milepost.tools.rewrite.groups import (
    Computed,
    Copied,
    Group,
    Streamed,
    TensorSpec,
    passed,
    whole_range,
)
from milepost.tools.rewrite.options import RewriteOptions
from milepost.tools.rewrite.problems import Problems
from milepost.tools.rewrite.report import RewriteReport
from milepost.tools.rewrite.rewrite import Rewrite
from milepost.tools.rewrite.run import run_rewrite
from milepost.tools.rewrite.source import SourceTensor

_BALANCING = re.compile(r"(e_score_correction_bias|expert_bias|balancing_biases|router_bias)$")
_PICKED_NBYTES = 16 * 2**20
_ROW_ELEMENT_NBYTES = 6 * 8
_TOKENIZER_FILES = re.compile(
    r"^(tokenizer.*|vocab\..*|merges\.txt|special_tokens_map\.json|added_tokens\.json"
    r"|chat_template.*|spiece\.model|.*\.tiktoken)$"
)


class Tokenizers(StrEnum):
    """What a merge does when a model has no `tokenizer.json`."""

    REQUIRE = "require"
    ALLOW_MISSING = "allow-missing"


def merge_models(
    recipe: Recipe,
    output: PathLike,
    *,
    tokenizers: Tokenizers = Tokenizers.REQUIRE,
    options: RewriteOptions | None = None,
) -> RewriteReport:
    """Merge the models of `recipe` into the directory `output`.

    Every tensor is made in fp32 and rounded once, to `recipe.dtype` or to the type of the first
    model (of the base, if there is one); router-balancing tensors keep theirs. Integers must be the
    same everywhere. A path of an adapter alone, or `BASE+ADAPTER`, stands for the base with the
    adapter merged. Files beside the weights are those of the model whose tokenizer is taken; what
    belongs to one training alone (sidecars) is not carried. Embeddings are brought together by
    token where `recipe.tokenizer` is given; else the vocabularies must be the same.

    Everything that is wrong with names, shapes and vocabularies is told at once, before anything is
    written. Errors: see `run_rewrite`.
    """
    return _Merge(recipe, tokenizers).run(output, options)


class _Merge:
    def __init__(self, recipe: Recipe, tokenizers: Tokenizers) -> None:
        self._recipe, self._tokenizers = recipe, tokenizers
        self._problems = Problems()
        self._sources = {
            str(path): open_with_adapter(path, self._problems) for path in recipe.paths()
        }
        for source in self._sources.values():
            refuse_quantised(source, "merge-models")
        self._main = self._sources[str(self._main_path())]
        self._document, self._target = self._tokenizer()

    def run(self, output: PathLike, options: RewriteOptions | None) -> RewriteReport:
        recipe, problems = self._recipe, self._problems
        planner = Planner(recipe, self._sources, problems)
        wanted = problems.attempt(lambda: list(planner.plan())) or []
        groups = [group for each in wanted if (group := self._group(each)) is not None]
        read = {id(tensor) for group in groups for tensor in group.sources}
        sources = [self._main, *(s for s in self._sources.values() if s is not self._main)]
        names = {spec.name for group in groups for spec in group.outputs}
        rewrite = Rewrite(
            verb="merge-models",
            sources=sources,
            groups=groups,
            arguments=self._arguments(),
            aux=self._aux(),
            states_dtype=True,
            edit_config=lambda config: self._edit_config(config, planner, names),
            relation=Relation(
                kind=RelationKind.MERGE,
                base_models=[found for s in sources if (found := hub_id_of(s)) is not None],
            ),
            dropped={
                name: "not taken into the merge"
                for name, tensor in self._main.tensors.items()
                if id(tensor) not in read
            },
            tied={a: kept for a, kept in self._main.tied.items() if a not in names},
            problems=problems,
        )
        return run_rewrite(rewrite, output, self._options(len(sources), options))

    def _options(self, inputs: int, given: RewriteOptions | None) -> RewriteOptions:
        """With memory for every thread, unless the caller said how much."""
        options = given or RewriteOptions()
        chunks = _chunks_nbytes(self._recipe.definition, longest_numel(), inputs)
        room = options.threads * (chunks + _PICKED_NBYTES)
        return replace(options, memory_nbytes=options.memory_nbytes or room)

    def _arguments(self) -> dict[str, Any]:
        recipe = self._recipe
        slices = [
            {
                "models": [
                    {
                        "model": ingredient.path.name,
                        "parameters": dict(ingredient.parameters),
                        **({"layers": list(ingredient.layers)} if ingredient.layers else {}),
                    }
                    for ingredient in each.ingredients
                ],
                "parameters": dict(each.parameters),
            }
            for each in recipe.slices
        ]
        return {
            "method": recipe.method,
            "base_model": None if recipe.base is None else recipe.base.name,
            "slices": slices,
            "parameters": dict(recipe.parameters),
            "dtype": recipe.dtype,
            "tokenizer_source": recipe.tokenizer,
            "seed": recipe.seed,
        }

    # ---- tokens

    def _main_path(self) -> Path:
        """The model whose config, tokenizer and other files the output has."""
        named = self._recipe.tokenizer
        paths = self._recipe.paths()
        if named in (None, "base", "union"):
            return paths[0]
        for path in paths:
            if path == Path(str(named)):
                return path
        raise InvalidInputError(
            f"tokenizer source {named}: is none of the merged models; choose base, union or one "
            f"of {', '.join(map(str, paths))}"
        )

    def _tokenizer(self) -> tuple[dict[str, Any] | None, dict[str, int] | None]:
        """The `tokenizer.json` of the output where it is a new one, and ids by token."""
        vocabularies = self._vocabularies()
        own = vocabularies[str(self._main.path)]
        if own is None:
            if self._tokenizers is Tokenizers.REQUIRE:
                self._problems.refuse(
                    f"{self._main.path}: has no {TOKENIZER}, so the merge would have no tokenizer; "
                    "name another source of it, or allow it to be missing"
                )
            return None, None
        others = {path: v for path, v in vocabularies.items() if v is not None and v != own}
        if not others:
            return None, own
        if self._recipe.tokenizer is None:
            listed = ", ".join(
                f"{path} ({len(v)} tokens, {len(set(v) - set(own))} of its own)"
                for path, v in others.items()
            )
            self._problems.refuse(
                f"vocabularies differ from that of {self._main.path} ({len(own)} tokens): "
                f"{listed}; rows of embeddings would be mixed up: choose a tokenizer source (base, "
                "union, or one of the models)"
            )
            return None, own
        if self._recipe.tokenizer != "union":
            return None, own
        document = json.loads((self._main.path / TOKENIZER).read_bytes())
        made = united(document, list(others.values()))
        return made, vocabulary_of(made)

    def _vocabularies(self) -> dict[str, dict[str, int] | None]:
        return {str(source.path): read_vocabulary(source.path) for source in self._sources.values()}

    def _alignment(self, tensors: Sequence[SourceTensor]) -> Alignment | None:
        """How to bring rows together; None when they are together already."""
        vocabularies = self._vocabularies()
        own = [vocabularies[str(tensor.source.path)] for tensor in tensors]
        lengths = [tensor.shape[0] for tensor in tensors]
        target = self._target
        if target is None or any(each is None for each in own):
            return None
        if len(set(lengths)) == 1 and all(each == target for each in own):
            return None
        known = [each for each in own if each is not None]
        rows = max(max(target.values(), default=-1) + 1, self._main_rows(tensors))
        base = len(tensors) - 1 if self._recipe.base is not None else None
        padding = padded(rows, self._recipe.pad_to_multiple_of)
        return align(target, known, lengths, rows=padding, base=base)

    def _main_rows(self, tensors: Sequence[SourceTensor]) -> int:
        own = [t.shape[0] for t in tensors if t.source is self._main]
        return max(own, default=0)

    # ---- tensors

    def _group(self, wanted: Wanted) -> Group | None:
        inputs = [*wanted.tensors, *([wanted.base] if wanted.base is not None else [])]
        first = wanted.base or wanted.tensors[0]
        shape = first.shape
        alignment = self._alignment(inputs) if is_by_token(wanted.name) else None
        if alignment is not None:
            shape = (alignment.rows, *first.shape[1:])
        elif len({tensor.shape for tensor in inputs}) > 1:
            listed = ", ".join(f"{list(t.shape)} in {t.source.path}" for t in inputs)
            self._problems.refuse(
                f"{wanted.name}: {listed}; rows cannot be told apart without a {TOKENIZER} of each"
            )
            return None
        if any(tensor.dtype not in FLOATS for tensor in inputs):
            return self._same(wanted.name, inputs)
        keeps = self._recipe.dtype is None or _BALANCING.search(wanted.name)
        dtype = first.dtype if keeps else str(self._recipe.dtype)
        spec = TensorSpec(name=wanted.name, dtype=dtype, shape=shape)
        return self._problems.attempt(lambda: self._made(wanted, inputs, spec, alignment))

    def _made(
        self,
        wanted: Wanted,
        inputs: Sequence[SourceTensor],
        spec: TensorSpec,
        alignment: Alignment | None,
    ) -> Group:
        recipe = self._recipe
        method = recipe.definition
        values = resolve(method, wanted.shared, wanted.each, wanted.name, wanted.depth, recipe.seed)
        is_copy = recipe.method == "passthrough" and values.each["scale"][0] == 1.0
        if is_copy and alignment is None and inputs[0].dtype == spec.dtype:
            return Copied(output=spec, ranges=(whole_range(inputs[0]),))

        def make() -> Iterator[Tensor]:
            flats = [_flat(tensor) for tensor in inputs]
            if alignment is not None:
                tables = alignment.aligned([tensor.read() for tensor in inputs])
                flats = [flat(table) for table in tables]
            base = None if wanted.base is None else flats.pop()
            merged = method.run(Inputs(flats, torch.Size(spec.shape), base, wanted.name), values)
            return rounded(merged, torch_type(spec.dtype))

        return Streamed(
            inputs=tuple(inputs),
            output=spec,
            make=make,
            memory_nbytes=_memory_nbytes(method, inputs, spec, alignment),
        )

    def _same(self, name: str, inputs: Sequence[SourceTensor]) -> Group:
        """Integers and booleans cannot be averaged: they must be the same."""
        first = inputs[0]
        if len({tensor.dtype for tensor in inputs}) > 1:
            self._problems.refuse(
                f"{name}: {', '.join(f'{t.dtype} in {t.source.path}' for t in inputs)}"
            )
        if len(inputs) == 1:
            return passed(first, name=name)
        spec = TensorSpec(name=name, dtype=first.dtype, shape=first.shape)

        def make(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
            for number, tensor in enumerate(inputs):
                if not torch.equal(tensors["0"], tensors[str(number)]):
                    raise InvalidInputError(
                        f"{name}: {first.dtype} cannot be merged, and {tensor.source.path} has "
                        f"other values than {first.source.path}"
                    )
            return {name: tensors["0"]}

        return Computed(
            inputs={str(number): tensor for number, tensor in enumerate(inputs)},
            outputs=(spec,),
            make=make,
        )

    # ---- beside the weights

    def _aux(self) -> Carried:
        carried = carried_files(self._main.checkpoint)
        for name in [*SIDECARS, "README.md"]:
            carried.paths.pop(name, None)
            carried.documents.pop(name, None)
        if carried.needs:
            carried.notes.append(
                f"not carried, since they belong to one training: {', '.join(carried.needs)}"
            )
        carried.needs = []
        if self._document is not None:
            text = json.dumps(self._document, ensure_ascii=False, indent=2)
            carried.paths.pop(TOKENIZER, None)
            carried.documents[TOKENIZER] = text.encode() + b"\n"
        if not any(_TOKENIZER_FILES.match(name) for name in carried.names):
            carried.notes.append("the output has no tokenizer")
        return carried

    def _edit_config(self, config: dict[str, Any], planner: Planner, names: set[str]) -> list[str]:
        inner = config.get("text_config")
        text = inner if isinstance(inner, dict) else config
        notes = []
        rows = self._rows_of(names)
        if rows is not None and text.get("vocab_size") not in (None, rows):
            notes.append(f"vocab_size: {text['vocab_size']} became {rows}")
            text["vocab_size"] = rows
        if not self._recipe.whole:
            spans = [planner.span(number) for number in range(len(self._recipe.slices))]
            notes += set_layers(text, [n for first, end in spans for n in range(first, end)])
        for place in (config, text):
            if place.get("tie_word_embeddings") and any(
                n.endswith("lm_head.weight") for n in names
            ):
                place["tie_word_embeddings"] = False
                notes.append("tie_word_embeddings: false, since not all models are tied")
        return notes

    def _rows_of(self, names: set[str]) -> int | None:
        name = next((n for n in sorted(names) if is_by_token(n)), None)
        if name is None or self._target is None or self._recipe.tokenizer is None:
            return None
        own = self._main.tensors.get(name)
        rows = max(max(self._target.values(), default=-1) + 1, own.shape[0] if own else 0)
        return padded(rows, self._recipe.pad_to_multiple_of)


def _flat(tensor: SourceTensor) -> Flat:
    return Flat(tensor.stored.torch_dtype(), tensor.stream)


def _chunks_nbytes(method: Method, numel: int, inputs: int) -> int:
    """Memory of one thread that goes over so many inputs, `numel` elements at a time.

    Rows are ranked in 64 bits: sizes with places, places alone, ranks, and what limits are made of.
    """
    return numel * (4 * (3 * inputs + 6) + (_ROW_ELEMENT_NBYTES if method.by_row else 0))


def _memory_nbytes(
    method: Method, inputs: Sequence[SourceTensor], spec: TensorSpec, alignment: Alignment | None
) -> int:
    """What a merge holds: some chunks; tables that are aligned; what a method picked."""
    numel, chunk = prod(spec.shape), longest_numel()
    if method.by_row:
        chunk = max(chunk, prod(spec.shape[1:]) if len(spec.shape) > 1 else numel)
    held = _chunks_nbytes(method, min(numel, chunk), len(inputs))
    held += sum(tensor.held_nbytes for tensor in inputs)
    if alignment is not None:
        held += sum(2 * tensor.nbytes for tensor in inputs)
    return held + (len(inputs) * numel // 4 if method.picks else 0)
