"""What to merge and how: from the command line, or from YAML in mergekit's form."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from milepost.errors import FormatError, InvalidInputError
from milepost.storage.fileops import PathLike
from milepost.tools.merging.methods import METHODS, Base, Method
from milepost.tools.merging.parameters import Setting
from milepost.tools.rewrite.dtypes import float_type

_TOP = frozenset(
    {
        *("models", "slices", "merge_method", "base_model", "parameters", "dtype", "out_dtype"),
        *("tokenizer_source", "tokenizer", "random_seed", "chat_template"),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ingredient:
    """A model with knobs of its own; `layers` are those taken of it, of all when None."""

    path: Path
    parameters: Mapping[str, Setting] = field(default_factory=dict)
    layers: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Layers of the output, each made of one layer of every ingredient."""

    ingredients: Sequence[Ingredient]
    parameters: Mapping[str, Setting] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One merge. A single slice without layers is a merge of whole models.

    `tokenizer` is `base`, `union`, a path, or None, for which the vocabularies must be the same.
    """

    method: str
    slices: Sequence[Slice]
    base: Path | None = None
    parameters: Mapping[str, Setting] = field(default_factory=dict)
    dtype: str | None = None
    tokenizer: str | None = None
    pad_to_multiple_of: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise InvalidInputError(
                f"merge method {self.method!r} is not known; choose from {', '.join(METHODS)}"
            )
        self._check_parameters()
        for each in self.slices:
            self._check_counts(each)

    @property
    def definition(self) -> Method:
        return METHODS[self.method]

    @property
    def whole(self) -> bool:
        """Whether all layers of all models are taken."""
        return all(i.layers is None for each in self.slices for i in each.ingredients)

    def paths(self) -> list[Path]:
        """Every model once, the base first."""
        named = [i.path for each in self.slices for i in each.ingredients]
        return list(dict.fromkeys(([self.base] if self.base is not None else []) + named))

    def _check_parameters(self) -> None:
        """Knobs that the method does not read, and a base that it does not want or lacks."""
        known = self.definition.parameters
        levels = [self.parameters]
        for each in self.slices:
            levels += [each.parameters, *(i.parameters for i in each.ingredients)]
        unread = sorted({name for level in levels for name in level} - set(known))
        if unread:
            raise InvalidInputError(
                f"{self.method} does not read {', '.join(unread)}; it reads "
                f"{', '.join(known) or 'nothing'}; leave out what has no effect"
            )
        if self.base is None and self.definition.base is Base.REQUIRED:
            raise InvalidInputError(
                f"{self.method} adds up differences to a base model; name it (--base-model)"
            )
        if self.base is not None and self.definition.base is Base.REFUSED:
            raise InvalidInputError(f"{self.method} has no use for a base model; leave it out")

    def _check_counts(self, each: Slice) -> None:
        count = len(each.ingredients)
        least, most = self.definition.least, self.definition.most
        if count < least or (most is not None and count > most):
            wanted = str(least) if most == least else f"at least {least}"
            wanted = f"at most {most}" if most is not None and count > most else wanted
            raise InvalidInputError(
                f"{self.method} merges {wanted} models besides a base, and was given {count}"
            )


def ingredient_of(text: str) -> Ingredient:
    """`PATH` or `PATH:WEIGHT`; what follows the last colon is a weight when it is a number."""
    path, colon, last = text.rpartition(":")
    if colon and path:
        try:
            return Ingredient(path=Path(path), parameters={"weight": float(last)})
        except ValueError:
            pass
    return Ingredient(path=Path(text))


TIES_DENSITY = 0.6
"""What the command line takes for `ties` when no density is given; YAML takes 1, as mergekit."""


def recipe_from_command_line(
    models: Sequence[str],
    *,
    method: str | None,
    base: Path | None,
    dtype: str | None,
    knobs: Mapping[str, float],
    settings: Sequence[str],
    tokenizer: str | None,
    seed: int,
) -> Recipe:
    """The merge of whole models; `models` are `PATH` or `PATH:WEIGHT`, `settings` `NAME=VALUE`."""
    if method is None or not models:
        raise InvalidInputError("name the models (--models) and the method (--method), or --config")
    parameters: dict[str, Setting] = dict(knobs)
    for setting in settings:
        name, equals, value = setting.partition("=")
        try:
            plain = _PLAIN.get(value.lower())
            parameters[name] = float(value) if plain is None else plain
        except ValueError:
            equals = ""
        if not equals or name in knobs:
            raise InvalidInputError(f"--parameter {setting}: expected NAME=VALUE, each name once")
    name = method.replace("-", "_")
    if name == "ties":
        parameters.setdefault("density", TIES_DENSITY)
    return Recipe(
        method=name,
        slices=[Slice(ingredients=[ingredient_of(model) for model in models])],
        base=base,
        parameters=parameters,
        dtype=None if dtype is None else float_type(dtype),
        tokenizer=tokenizer,
        seed=seed,
    )


_PLAIN = {"true": 1.0, "on": 1.0, "false": 0.0, "off": 0.0}


def recipe_from_yaml(path: PathLike) -> Recipe:
    """The merge that a file in mergekit's form describes.

    `models` or `slices`, `merge_method`, `base_model`, `parameters`, `dtype`, `out_dtype`,
    `tokenizer_source`, `tokenizer` (`source` and `pad_to_multiple_of`), `random_seed`. Relative
    paths are those of the working directory, as there. `FormatError` for anything else.
    """
    import yaml

    where = os.fspath(path)
    try:
        document = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise FormatError(f"{where}: not YAML: {error}", path=path) from error
    if not isinstance(document, dict):
        raise FormatError(f"{where}: expected keys and values", path=path)
    return _Reader(document, where).recipe()


class _Reader:
    """Reads one document, naming the key in every error."""

    def __init__(self, document: dict[str, Any], where: str) -> None:
        self._document, self._where = document, where

    def _refuse(self, text: str) -> FormatError:
        return FormatError(f"{self._where}: {text}", path=self._where)

    def recipe(self) -> Recipe:
        document = self._document
        unknown = sorted(set(document) - _TOP)
        if unknown:
            raise self._refuse(f"keys that are not understood: {', '.join(unknown)}")
        if document.get("chat_template") not in (None, "auto"):
            raise self._refuse("chat_template: only auto, that of the tokenizer, is understood")
        method = self._text("merge_method")
        base = document.get("base_model")
        slices = self._slices()
        if method in METHODS and METHODS[method].base is Base.REFUSED and base is not None:
            slices, base = [_base_first(each, Path(str(base))) for each in slices], None
        elif base is not None:
            slices = [_without(each, Path(str(base))) for each in slices]
        tokenizer, padding = self._tokenizer()
        dtype = document.get("out_dtype") or document.get("dtype")
        return Recipe(
            method=method,
            slices=slices,
            base=None if base is None else Path(str(base)),
            parameters=self._parameters(document, "parameters"),
            dtype=None if dtype is None else float_type(str(dtype)),
            tokenizer=tokenizer,
            pad_to_multiple_of=padding,
            seed=int(document.get("random_seed") or 0),
        )

    def _text(self, key: str) -> str:
        value = self._document.get(key)
        if not isinstance(value, str):
            raise self._refuse(f"{key}: expected a text, found {value!r}")
        return value

    def _slices(self) -> list[Slice]:
        models, slices = self._document.get("models"), self._document.get("slices")
        if (models is None) == (slices is None):
            raise self._refuse("give either models or slices")
        if models is not None:
            return [Slice(ingredients=self._ingredients(models, "models"))]
        if not isinstance(slices, list) or not slices:
            raise self._refuse("slices: expected a list")
        found = []
        for number, each in enumerate(slices):
            place = f"slices[{number}]"
            if not isinstance(each, dict) or set(each) - {"sources", "parameters"}:
                raise self._refuse(f"{place}: expected the keys sources and parameters")
            found.append(
                Slice(
                    ingredients=self._ingredients(each.get("sources"), f"{place}.sources"),
                    parameters=self._parameters(each, f"{place}.parameters"),
                )
            )
        return found

    def _ingredients(self, items: Any, place: str) -> list[Ingredient]:
        if not isinstance(items, list) or not items:
            raise self._refuse(f"{place}: expected a list of models")
        return [self._ingredient(item, f"{place}[{n}]") for n, item in enumerate(items)]

    def _ingredient(self, item: Any, place: str) -> Ingredient:
        if not isinstance(item, dict) or set(item) - {"model", "parameters", "layer_range"}:
            raise self._refuse(f"{place}: expected the keys model, parameters, layer_range")
        if not isinstance(item.get("model"), str):
            raise self._refuse(f"{place}.model: expected a path, found {item.get('model')!r}")
        layers = item.get("layer_range")
        if layers is not None and not (
            isinstance(layers, list)
            and len(layers) == 2
            and all(isinstance(end, int) for end in layers)
            and 0 <= layers[0] < layers[1]
        ):
            raise self._refuse(f"{place}.layer_range: expected [first, end], found {layers!r}")
        return Ingredient(
            path=Path(item["model"]),
            parameters=self._parameters(item, f"{place}.parameters"),
            layers=None if layers is None else (layers[0], layers[1]),
        )

    def _parameters(self, item: Mapping[str, Any], place: str) -> dict[str, Setting]:
        found = item.get("parameters") or {}
        if not isinstance(found, dict):
            raise self._refuse(f"{place}: expected keys and values, found {found!r}")
        return {key: value for key, value in found.items() if key != "int8_mask"}

    def _tokenizer(self) -> tuple[str | None, int | None]:
        block = self._document.get("tokenizer")
        source = self._document.get("tokenizer_source")
        if block is None:
            return (None if source is None else str(source)), None
        if not isinstance(block, dict) or set(block) - {"source", "pad_to_multiple_of"}:
            raise self._refuse("tokenizer: expected the keys source and pad_to_multiple_of")
        padding = block.get("pad_to_multiple_of")
        return str(block.get("source", "union")), None if padding is None else int(padding)


def _base_first(each: Slice, base: Path) -> Slice:
    """The base of a method that has none (slerp) is its first model."""
    ordered = sorted(each.ingredients, key=lambda ingredient: ingredient.path != base)
    if ordered[0].path != base:
        ordered = [Ingredient(path=base), *ordered]
    return Slice(ingredients=ordered, parameters=each.parameters)


def _without(each: Slice, base: Path) -> Slice:
    """A base that is listed among the models too has no difference to itself."""
    kept = [ingredient for ingredient in each.ingredients if ingredient.path != base]
    return Slice(ingredients=kept, parameters=each.parameters)
