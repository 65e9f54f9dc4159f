"""`reattach_vision_tower`: a language model that was trained alone goes back into its base.

What is not text in the base (vision tower, projector, layers of multi-token prediction) is taken
byte for byte; what is text comes from the trained model, under the names that it has in the whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from milepost.format.manifest import Manifest
from milepost.format.tree import encode as encode_tree
from milepost.hf.aux_files import CONFIG
from milepost.hf.card import is_hub_id
from milepost.storage.fileops import PathLike
from milepost.tools.carried import Carried
from milepost.tools.cast import refuse_quantised
from milepost.tools.reattach_families import (
    WRAPPINGS,
    Wrapping,
    supported_reattach_model_types,
)
from milepost.tools.reattach_files import base_directory, composite_config, reattached_files
from milepost.tools.rewrite.cards import Relation, RelationKind, hub_id_of
from milepost.tools.rewrite.groups import Group, passed
from milepost.tools.rewrite.options import RewriteOptions
from milepost.tools.rewrite.problems import Problems
from milepost.tools.rewrite.report import RewriteReport
from milepost.tools.rewrite.rewrite import Rewrite
from milepost.tools.rewrite.run import run_rewrite
from milepost.tools.rewrite.source import Source, SourceTensor, open_source

__all__ = ["reattach_vision_tower", "supported_reattach_model_types"]

_VERB = "reattach-vision-tower"
_EMBEDDING = "embed_tokens.weight"
_WEIGHT = "weight"
_TIED = "tie_word_embeddings"


def reattach_vision_tower(
    source: PathLike,
    base: PathLike,
    output: PathLike,
    *,
    revision: str | None = None,
    options: RewriteOptions | None = None,
) -> RewriteReport:
    """Write the base with the language model of `source` in place of its own as `output`.

    `base` is a directory, or a Hub id, of which `revision` is a branch, tag or commit. Refused, all
    at once: a source that is no text model or one of another architecture than the base's, a base
    without a vision part, names and shapes that do not fit (only the vocabulary may have another
    size), and a tie that the tensors contradict. For other errors see `run_rewrite`.
    """
    trained = open_source(source)
    whole = open_source(base_directory(str(base), revision))
    rewrite = Rewrite(verb=_VERB, sources=[trained, whole], groups=[])
    rewrite.arguments = {"base": str(base), "revision": revision}
    hub_id = str(base) if is_hub_id(str(base)) else hub_id_of(whole)
    if hub_id is not None:
        rewrite.relation = Relation(kind=RelationKind.FINETUNE, base_models=[hub_id])
    wrapping = _wrapping_of(trained, whole, rewrite.problems)
    if wrapping is None:
        rewrite.groups = [passed(tensor) for tensor in trained.tensors.values()]
        return run_rewrite(rewrite, output, options)
    fitting = _Fitting(trained, whole, wrapping, rewrite.problems)
    rewrite.groups = fitting.groups()
    rewrite.tied = fitting.ties()
    document = composite_config(trained, whole, is_tied=fitting.is_tied)
    carried = rewrite.problems.attempt(lambda: reattached_files(trained, whole, document))
    rewrite.aux = carried or Carried()
    rewrite.edit_manifest = lambda manifest: _state_config(manifest, rewrite.carried())
    rewrite.counts = {"text tensors": len(fitting.text), "of the base": len(fitting.others)}
    rewrite.notes += fitting.notes
    return run_rewrite(rewrite, output, options)


def _state_config(manifest: Manifest, carried: Carried) -> None:
    """The recorded configuration is that of the whole, as config.json has it."""
    manifest.model_config = encode_tree(json.loads(carried.documents[CONFIG]), key="config")


def _wrapping_of(trained: Source, whole: Source, problems: Problems) -> Wrapping | None:
    """Where the text lies in the base; None when the two configurations do not fit."""
    before = len(problems.messages)
    problems.attempt(lambda: refuse_quantised(trained, _VERB))
    problems.attempt(lambda: refuse_quantised(whole, _VERB))
    if "vision_config" in trained.config:
        problems.refuse(
            f"{trained.path}: has a vision_config, so it is a vision-language model already; "
            "nothing is to be put back"
        )
    kind, inner = whole.config.get("model_type"), whole.config.get("text_config")
    if not isinstance(whole.config.get("vision_config"), dict) or not isinstance(inner, dict):
        problems.refuse(
            f"{whole.path}: model_type {kind}: its config.json has no vision_config beside a "
            "text_config; give the vision-language model that the text model was taken from"
        )
        return None
    wrapping = WRAPPINGS.get(str(kind))
    if wrapping is None:
        problems.refuse(
            f"{whole.path}: model_type {kind}: where its text lies is not known; known are "
            f"{', '.join(supported_reattach_model_types())}"
        )
    own, expected = trained.config.get("model_type"), inner.get("model_type")
    if own != expected:
        problems.refuse(
            f"{trained.path}: model_type {own}, and the text model of {whole.path} is {expected}; "
            "give the base that this model was taken from"
        )
    return wrapping if len(problems.messages) == before else None


class _Fitting:
    """The trained text and the rest of the base, by the names that they have in the whole."""

    def __init__(
        self, trained: Source, whole: Source, wrapping: Wrapping, problems: Problems
    ) -> None:
        self._trained, self._whole = trained, whole
        self._wrapping, self._problems = wrapping, problems
        self._head = wrapping.head + _WEIGHT
        self.notes: list[str] = []
        self.text: dict[str, SourceTensor] = {}
        for name, tensor in trained.tensors.items():
            inner = wrapping.inner(name)
            if inner in self.text:
                problems.refuse(f"{trained.path}: {self.text[inner].name} and {name} are {inner}")
            self.text[inner] = tensor
        self.others = {
            name: tensor
            for name, tensor in whole.tensors.items()
            if not wrapping.is_text(name) and name not in self.text
        }
        self.is_tied = self._tied()

    def groups(self) -> list[Group]:
        """The output in the order of the base; what does not fit becomes a problem."""
        self._check_parts()
        self._check_names()
        self._check_shapes()
        self._check_vocabulary()
        everything = {**self.text, **self.others}
        ordered = dict.fromkeys([*self._whole.tensors, *self.text])
        return [passed(everything[name], name=name) for name in ordered if name in everything]

    def ties(self) -> dict[str, str]:
        """Recorded ties, by names in the whole."""
        inner = self._wrapping.inner
        own = {inner(alias): inner(name) for alias, name in self._trained.tied.items()}
        kept = {a: n for a, n in self._whole.tied.items() if a in self.others or n in self.others}
        return {**kept, **own}

    def _check_parts(self) -> None:
        body = self._wrapping.body
        if not any(name.startswith(body) for name in self._whole.tensors):
            self._problems.refuse(
                f"{self._whole.path}: no tensor's name begins with {body}, where models of this "
                "type have their text"
            )
        if not any(not self._wrapping.is_text(name) for name in self._whole.tensors):
            self._problems.refuse(
                f"{self._whole.path}: all its tensors are text; there is no vision tower to put on"
            )

    def _check_names(self) -> None:
        base, head = self._whole.tensors, self._head
        missing = [
            name
            for name in base
            if self._wrapping.is_text(name) and name not in self.text and name != head
        ]
        added = [self.text[name].name for name in self.text if name not in base and name != head]
        if missing:
            self._problems.refuse(
                f"{self._trained.path}: {len(missing)} text tensors of the base are not there: "
                f"{', '.join(missing)}"
            )
        if added:
            self._problems.refuse(
                f"{self._trained.path}: the base has no place for {len(added)} tensors: "
                f"{', '.join(added)}; experts that lie in another form are brought into the "
                "base's by fuse-moe-experts or unfuse-moe-experts"
            )
        trained = [name for name in self.text if name in base and not self._wrapping.is_text(name)]
        if trained:
            self.notes.append(
                f"{len(trained)} tensors beside the text are those of the trained model, not of "
                f"the base: {_some(trained)}"
            )

    def _check_shapes(self) -> None:
        for name, tensor in self.text.items():
            expected = self._expected_shape(name)
            if expected is not None and tensor.shape != expected:
                self._problems.refuse(
                    f"{tensor.name}: shape {tensor.shape}, and {expected} is expected as {name}"
                )

    def _expected_shape(self, name: str) -> tuple[int, ...] | None:
        """As the base has it, but a row for each token that the trained model has."""
        rows, embedding = self._rows, self._wrapping.body + _EMBEDDING
        like = name if name in self._whole.tensors else embedding
        if like not in self._whole.tensors or (like != name and name != self._head):
            return None  # told with the names
        shape = self._whole.tensors[like].shape
        if name in (self._head, embedding) and rows is not None:
            return (rows, *shape[1:])
        return shape

    @property
    def _rows(self) -> int | None:
        """Rows of the trained embedding; None when it is not there."""
        found = self.text.get(self._wrapping.body + _EMBEDDING)
        return found.shape[0] if found is not None and found.shape else None

    def _check_vocabulary(self) -> None:
        rows, stated = self._rows, self._trained.config.get("vocab_size")
        if rows is None:
            return
        if stated is not None and stated != rows:
            self._problems.refuse(
                f"{self._trained.path}: config.json says vocab_size {stated}, and the embedding "
                f"has {rows} rows"
            )
        for key, number in _token_ids(self._whole.config):
            if number >= rows:
                self._problems.refuse(
                    f"{self._whole.path}: {key} is {number}, and the trained embedding has {rows} "
                    "rows; images cannot be marked with a token that it lacks"
                )
        base = self._whole.tensors.get(self._wrapping.body + _EMBEDDING)
        if base is not None and base.shape[:1] != (rows,):
            self.notes.append(f"the vocabulary has {rows} rows, that of the base {base.shape[0]}")

    def _tied(self) -> bool:
        """Whether the head is the embedding: what the configuration says, or the tensors do."""
        has_head = self._head in self.text
        stated = self._trained.config.get(_TIED)
        is_tied = bool(stated) if isinstance(stated, bool) else not has_head
        if not is_tied and not has_head:
            self._problems.refuse(
                f"{self._trained.path}: config.json says {_TIED} false, and there is no head"
            )
        if is_tied and has_head:
            self.notes.append(
                f"{self._head} is stored although {_TIED} is true; loaders take the embedding"
            )
        if is_tied != (self._head not in self._whole.tensors):
            how = "is the embedding" if is_tied else "is a tensor of its own"
            self.notes.append(f"the head {how}, other than in the base; config.json says so")
        return is_tied


def _token_ids(config: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Tokens that stand for parts of images and the like, as the whole's configuration has them."""
    for key, value in config.items():
        if key.endswith(("_token_id", "_token_index")) and type(value) is int:
            yield key, value


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - 3} more" if len(listed) > 3 else ""
    return ", ".join(listed[:3]) + more
