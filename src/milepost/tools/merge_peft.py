"""`merge-peft-adapters`: low-rank adapters folded into their base, without loading a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

from milepost.adapters.kinds import ADAPTER_CONFIG
from milepost.errors import InvalidInputError
from milepost.storage.fileops import PathLike, remove_tree
from milepost.tools.carried import Carried
from milepost.tools.dequantize import dequantize
from milepost.tools.lowp.floats import FloatSource, as_floats
from milepost.tools.lowp.schemes import quantised_by
from milepost.tools.merge_peft_adapter import (
    OpenedAdapter,
    base_of,
    open_adapter,
    refuse_merged_twice,
    refuse_other_base,
    weighted_path,
)
from milepost.tools.merge_peft_base import BaseIndex
from milepost.tools.merge_peft_config import (
    MergeTask,
    default_task,
    set_classifier,
    set_untied,
    set_vocabulary,
)
from milepost.tools.merge_peft_edits import Difference, Differences
from milepost.tools.merge_peft_groups import Merging, TiedDelta
from milepost.tools.merge_peft_verify import unverifiable, verify_outputs
from milepost.tools.merging.vocabulary import TOKENIZER
from milepost.tools.rewrite.cards import Relation, RelationKind, hub_id_of
from milepost.tools.rewrite.dtypes import float_type
from milepost.tools.rewrite.options import RewriteOptions
from milepost.tools.rewrite.problems import Problems
from milepost.tools.rewrite.report import RewriteReport
from milepost.tools.rewrite.rewrite import Rewrite
from milepost.tools.rewrite.run import run_rewrite
from milepost.tools.rewrite.source import open_source

VERB = "merge-peft-adapters"
PARKED = "original_adapter_config"
_DEQUANTISED = ".base"
"""A quantised base as floats, in the hidden output while it is verified."""
_TOKENIZER_FILES = (TOKENIZER, "tokenizer_config.json", "special_tokens_map.json",
                    "added_tokens.json", "chat_template.jinja")  # fmt: skip


class Compare(Enum):
    """Whether the output is compared with the adapter before it gets its name."""

    NOTHING = "nothing"
    OUTPUTS = "outputs"
    """transformers and peft run base and adapters, and transformers the output, on some tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeReport(RewriteReport):
    """`differences` are those of the tensors that adapters touch, as they are stored, by name."""

    differences: Mapping[str, Difference]


def merge_peft_adapters(
    adapters: Sequence[PathLike],
    output: PathLike,
    *,
    base: PathLike | None = None,
    task: MergeTask | str | None = None,
    dtype: str | None = None,
    num_labels: int | None = None,
    tied: TiedDelta | str = TiedDelta.FOLD,
    compare: Compare = Compare.NOTHING,
    options: RewriteOptions | None = None,
) -> MergeReport:
    """Fold adapters (`DIR` or `DIR:WEIGHT`) into their base, as the directory `output`.

    Sums are made in fp32 and rounded once, to the dtype of the base's tensor or to `dtype`; of
    several adapters, the differences that each makes to the base are added up, times its weight.
    Sidecars of training in the directories of the adapters are applied. Tensors that no adapter
    touches keep their bytes. Of a quantised base, the weights become the floats that `dequantize`
    makes of them. `base` is by default what the adapters' configurations name; `task` follows
    their task type.

    Refused are adapters of which a tensor finds no place, that were folded into this base before,
    or were trained on another; bases that `dequantize` refuses; and adapters that change no stored
    value. Errors otherwise: see `run_rewrite`.
    """
    merge = _Merge(adapters, base, task, dtype, num_labels, TiedDelta(tied), compare)
    report = run_rewrite(merge.rewrite(), output, options)
    known = {each.name: getattr(report, each.name) for each in fields(RewriteReport)}
    return MergeReport(**known, differences=merge.differences.by_name)


class _Merge:
    def __init__(
        self,
        adapters: Sequence[PathLike],
        base: PathLike | None,
        task: MergeTask | str | None,
        dtype: str | None,
        num_labels: int | None,
        tied: TiedDelta,
        compare: Compare,
    ) -> None:
        if not adapters:
            raise InvalidInputError("no adapter was given (--adapter-dir)")
        self.adapters = [open_adapter(*weighted_path(str(text))) for text in adapters]
        path = base_of(self.adapters, base)
        self._dtype = None if dtype is None else float_type(dtype)
        self.source = open_base(path, self._dtype)
        self.task = default_task(self.adapters) if task is None else MergeTask(task)
        self.problems, self.differences = Problems(), Differences()
        self._num_labels, self._tied, self._compare = num_labels, tied, compare
        self._check_adapters()
        self.merging = Merging(
            BaseIndex(self.source),
            self.adapters,
            self.problems,
            self.differences,
            dtype=self._dtype,
            task=self.task,
            tied=tied,
        )

    def _check_adapters(self) -> None:
        problems = self.problems
        digests = [adapter.digest for adapter in self.adapters]
        for adapter in self.adapters:
            if digests.count(adapter.digest) > 1:
                problems.refuse(f"{adapter.directory}: the same adapter was given more than once")
            problems.attempt(partial(refuse_merged_twice, adapter, self.source))
            problems.attempt(partial(refuse_other_base, adapter, self.source))
        if self._compare is Compare.OUTPUTS:
            for problem in unverifiable(self.adapters):
                problems.refuse(problem)

    def rewrite(self) -> Rewrite:
        merging = self.merging
        groups = merging.groups()
        rewrite = Rewrite(
            verb=VERB,
            sources=[self.source, *(adapter.source for adapter in self.adapters)],
            groups=groups,
            arguments=self._arguments(),
            edit_config=self._edit_config,
            relation=self._relation(),
            dropped={**self.source.dropped, **merging.dropped},
            tied=merging.ties(),
            counts={"tensors to change": len(merging.edited)},
            notes=[*self._notes(), *merging.notes],
            problems=self.problems,
            provenance={"adapters": self._provenance(), **self._dequantised()},
        )
        rewrite.aux = self.problems.attempt(self._aux)
        rewrite.before_publish = lambda directory: self._before_publish(rewrite, directory)
        return rewrite

    def _arguments(self) -> dict[str, Any]:
        return {
            "adapters": [{"name": a.directory.name, "weight": a.weight} for a in self.adapters],
            "task": self.task.value,
            "dtype": self._dtype,
            "tied": self._tied.value,
        }

    def _relation(self) -> Relation:
        named = [adapter.config.base for adapter in self.adapters]
        found = [hub_id_of(self.source), *named]
        known = list(dict.fromkeys(name for name in found if name is not None))
        return Relation(kind=RelationKind.FINETUNE, base_models=known)

    def _provenance(self) -> list[dict[str, Any]]:
        """All adapters that are in the weights: those of the base, then these."""
        earlier = self.source.checkpoint.info.extra.get("provenance") or {}
        return [
            *earlier.get("adapters", ()),
            *(
                {"name": a.directory.name, "digest": a.digest, "weight": a.weight}
                for a in self.adapters
            ),
        ]

    def _dequantised(self) -> dict[str, str]:
        """The method by which the base was quantised, for provenance."""
        source = self.source
        return {"dequantised": str(quantised_by(source.stored))} if source.decoded else {}

    def _notes(self) -> list[str]:
        source = self.source
        types = ", ".join(sorted({t.dtype for t in source.tensors.values()}))
        notes = [f"merged onto {source.path} ({types})"]
        if source.decoded:
            notes = [
                f"merged onto the dequantised base {source.path}: {len(source.decoded)} weights "
                f"were quantised ({quantised_by(source.stored)}) and are read as floats ({types})"
            ]
        for adapter in self.adapters:
            named = adapter.config.base
            if named is not None and Path(named).name != self.source.path.name:
                notes.append(f"{adapter.directory} says that it was trained on {named}")
        return notes

    # ---- beside the weights

    def _aux(self) -> Carried:
        carried = self.source.carried()
        for adapter in self.adapters:
            name = f"{PARKED}/{ADAPTER_CONFIG}"
            number = 1
            while name in carried.names:
                number += 1
                name = f"{PARKED}/{number}/{ADAPTER_CONFIG}"
            carried.paths[name] = adapter.directory / ADAPTER_CONFIG
        for name, path in self.merging.sidecars.items():
            carried.documents.pop(name, None)
            carried.paths[name] = path
            carried.needs = list(dict.fromkeys([*carried.needs, name]))
        if self.merging.resized_by is not None:
            self._take_tokenizer(carried, self.merging.resized_by)
        return carried

    def _take_tokenizer(self, carried: Carried, adapter: OpenedAdapter) -> None:
        """The tokenizer that has the new tokens lies beside the adapter."""
        held = [n for n in _TOKENIZER_FILES if (adapter.directory / n).is_file()]
        if not held:
            carried.notes.append(
                f"the vocabulary has other rows than the base's, and {adapter.directory} has no "
                "tokenizer: put the one with the new tokens into the output"
            )
        for name in held:
            carried.documents.pop(name, None)
            carried.paths[name] = adapter.directory / name
        if held:
            carried.notes.append(f"the tokenizer is that beside the adapter: {', '.join(held)}")

    def _edit_config(self, document: dict[str, Any]) -> list[str]:
        merging = self.merging
        notes = self.source.edit_config(document)
        notes += set_vocabulary(document, merging.vocabulary)
        if merging.untied:
            notes += set_untied(document, merging.untied)
        if self.task is MergeTask.CLASSIFICATION:
            notes += set_classifier(document, self.adapters, merging.labels, self._num_labels)
        text = document.get("text_config")
        for key, value in merging.config.items():
            place = text if isinstance(text, dict) and key in text else document
            place[key] = value
            notes.append(f"config.json: {key} is set to {value}")
        return notes

    # ---- before it is published

    def _before_publish(self, rewrite: Rewrite, directory: Path) -> None:
        found = self.differences.by_name
        changed = {name: each for name, each in found.items() if each.changed}
        if not changed and not self.merging.replaced:
            raise InvalidInputError(
                f"the adapters change no stored value of {self.source.path}: their factors are "
                "zero, or too small for the dtype of the base (--dtype float32); nothing was kept"
            )
        rewrite.counts = {"changed": len(changed) + len(self.merging.replaced)}
        rewrite.notes += _told(changed)
        lost = sum(each.moved - each.changed for each in found.values())
        if lost:
            moved = sum(each.moved for each in found.values())
            rewrite.notes.append(
                f"{lost} of {moved} elements that the adapters move are the same as before after "
                "rounding to the stored dtype (--dtype float32 keeps them)"
            )
        if self._compare is Compare.OUTPUTS:
            rewrite.notes += self._verify(directory)

    def _verify(self, directory: Path) -> list[str]:
        """Of a quantised base, the floats that were merged onto are written for transformers."""
        source = self.source
        if not source.decoded:
            return verify_outputs(source.path, self.adapters, directory, self.task)
        base = directory / _DEQUANTISED
        dtype = source.tensors[min(source.decoded)].dtype
        try:
            dequantize(source.path, base, dtype=dtype, options=RewriteOptions(is_durable=False))
            return verify_outputs(base, self.adapters, directory, self.task)
        finally:
            remove_tree(base)


def open_base(path: Path, dtype: str | None) -> FloatSource:
    """The base of a merge, its weights as floats: those of a quantised one in fp32 when the output
    has a `dtype` of its own, else in the type that they are kept in once they are dequantised.

    `InvalidInputError` for a quantised base that `dequantize` refuses.
    """
    stored = open_source(path)
    name = quantised_by(stored)
    if name is None:
        return FloatSource(stored, None)
    problems = Problems()
    floats = as_floats(stored, problems, is_rounded=dtype is None)
    if problems or not floats.decoded:
        why = "; ".join(problems.messages) or "no weight is one of codes with scales"
        raise InvalidInputError(
            f"{path}: its weights are quantised ({name}), and cannot be dequantised: {why}; an "
            "adapter that was trained on them merges onto the 16-bit model that they were made of: "
            "name it (--base-model)",
            path=path,
        )
    return floats


def _told(changed: Mapping[str, Difference]) -> list[str]:
    norms = {name: each.square**0.5 for name, each in changed.items()}
    if not norms:
        return []
    least, most = (pick(norms, key=lambda name: norms[name]) for pick in (min, max))
    whole = sum(each.square for each in changed.values()) ** 0.5
    return [
        f"{len(norms)} tensors changed; the norm of all differences is {whole:.6g}, of one tensor "
        f"from {norms[least]:.6g} ({least}) to {norms[most]:.6g} ({most})"
    ]
