"""Parts of frozen weights that are not copied for a save behind training.

A part that the last save of the run had with the same bytes will be linked, so nobody reads what
lies in memory again, and host memory for it would be wasted. Content decides: this rank's share is
hashed while it cannot change, and what is hashed is what will be linked. Should the part have to be
written after all, because the earlier file is gone or damaged, live memory is read, and must still
have these digests.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from torch import Tensor

from milepost.checkpointing.files import FilesPlan, PlannedFile
from milepost.checkpointing.pace import Pace
from milepost.engine.source import ByteSource, RangeSource, TensorSource
from milepost.engine.write import WriteOptions, digest_files
from milepost.errors import StateChangedError
from milepost.format.digests import Extent

_Key: TypeAlias = tuple[int, int]
"""The number of a copy, and of a file in its plan."""


@dataclass(frozen=True, slots=True)
class _Share:
    """What a rank wrote of a part, or would have; `is_steady` unless the save before had other
    bytes."""

    save: str
    extents: list[Extent]
    is_steady: bool


_RUNS = 4
_shares: dict[Path, dict[tuple[int, str], _Share]] = {}


def remember_share(staging: Path, copy: int, file: PlannedFile, extents: Sequence[Extent]) -> None:
    """What this rank's share of a part of frozen weights is, for the next save to compare with."""
    if file.header is None:
        return
    of_run = _shares.pop(staging.parent, {})
    last = of_run.get((copy, file.name))
    is_steady = last is None or last.extents == list(extents)
    if last is not None and last.save == staging.name:  # compared first, then written
        is_steady = last.is_steady
    share = _Share(staging.name, list(extents), is_steady)
    # Another dict each time: a save that begins meanwhile may be reading the one before.
    _shares[staging.parent] = {**of_run, (copy, file.name): share}
    while len(_shares) > _RUNS:
        del _shares[next(iter(_shares))]


def check_share(file: PlannedFile, extents: Sequence[Extent]) -> None:
    """`StateChangedError` when what was written of a held part is not what was hashed at the
    call."""
    if file.digested is None:
        return
    before = {(each.start, each.nbytes): each.digest for each in file.digested}
    changed = [each for each in extents if before.get((each.start, each.nbytes)) != each.digest]
    if changed:
        names = list(dict.fromkeys(filter(None, (_name_at(file, each.start) for each in changed))))
        raise StateChangedError(
            f"{file.name}: {len(names)} frozen tensors changed before they were written: "
            f"{', '.join(names[:5])}; the file that they were to be linked to is gone or damaged, "
            "so nothing was saved; save again"
        )


class FrozenParts:
    """The parts of a save that are held: hashed, and left where they are.

    `run` is the directory of the run. Parts whose tensors are all `is_late` are hashed by a thread
    while the caller goes on, and must not change until `hold` has returned. When such a part turns
    out to be another than that of the last save, `hold` waits for `pace`: until it is in its
    file.
    """

    def __init__(
        self,
        run: Path,
        plans: Sequence[FilesPlan],
        options: WriteOptions,
        *,
        is_late: Callable[[Tensor], bool],
        pace: Pace,
    ) -> None:
        self._plans, self._pace = plans, pace
        self._options = replace(options, on_bytes=None)
        self._known = {key: one for key, one in _shares.get(run, {}).items() if one.is_steady}
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        wanted = [
            (copy, number)
            for copy, plan in enumerate(plans)
            for number in _candidates(plan)
            if (copy, plan.files[number].name) in self._known
        ]
        self._late = [key for key in wanted if all(map(is_late, _tensors(self._file(key))))]
        found = self._hash([key for key in wanted if key not in self._late])
        self._digested = {key: own for key, own in found.items() if self._is_known(key, own)}
        if self._late:
            self._thread = threading.Thread(target=self._hash_late, name="milepost-frozen")
            self._thread.start()

    def numbers(self, copy: int) -> set[int]:
        """The files of a copy that need not be copied into host memory."""
        return {number for own, number in (*self._digested, *self._late) if own == copy}

    def hold(self) -> None:
        """Return when the tensors of all held parts may change."""
        self._join()
        if self._thread is not None and not all(
            self._is_known(key, self._digested.get(key)) for key in self._late
        ):
            self._pace.wait()

    def settled(self, plans: Sequence[FilesPlan]) -> list[FilesPlan]:
        """`plans` with the digests of held parts; returns when all are known."""
        self._join()
        if self._failure is not None:
            raise self._failure
        return [
            replace(
                plan,
                files=tuple(
                    replace(file, digested=self._digested.get((copy, number)))
                    for number, file in enumerate(plan.files)
                ),
            )
            for copy, plan in enumerate(plans)
        ]

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _file(self, key: _Key) -> PlannedFile:
        return self._plans[key[0]].files[key[1]]

    def _is_known(self, key: _Key, own: list[Extent] | None) -> bool:
        return own is not None and own == self._known[key[0], self._file(key).name].extents

    def _hash(self, keys: Sequence[_Key]) -> dict[_Key, list[Extent]]:
        writes = [self._file(key).write_into(Path()) for key in keys]
        return dict(zip(keys, digest_files(writes, self._options), strict=True))

    def _hash_late(self) -> None:
        try:
            self._digested |= self._hash(self._late)
        except BaseException as error:  # noqa: BLE001 - raised by `settled`
            self._failure = error


def _candidates(plan: FilesPlan) -> Iterator[int]:
    """Parts of frozen weights whose share of this rank lies in host memory and does not travel."""
    travelling = {str(step.path) for step in plan.steps}
    for number, file in enumerate(plan.files):
        if file.header is None or not file.pieces or file.name in travelling:
            continue
        if all(tensor.device.type == "cpu" for tensor in _tensors(file)):
            yield number


def _tensors(file: PlannedFile) -> Iterator[Tensor]:
    for piece in file.pieces:
        source = _tensor_source(piece.source)
        if source is not None:
            yield source.tensor


def _tensor_source(source: ByteSource) -> TensorSource | None:
    if isinstance(source, RangeSource):
        return _tensor_source(source.source)
    return source if isinstance(source, TensorSource) else None


def _name_at(file: PlannedFile, start: int) -> str | None:
    """The tensor that has this byte of the file."""
    for piece in file.pieces:
        if piece.start <= start < piece.end:
            source = _tensor_source(piece.source)
            return None if source is None else source.name
    return None
