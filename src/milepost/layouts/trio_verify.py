"""Everything that `verify` checks in a trio."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from milepost.engine.verify import BadExtent, find_bad_extents, tensor_at
from milepost.errors import CheckpointError, UnsafePickleError
from milepost.layouts.checkpoint import Problem, Severity, VerifyReport
from milepost.layouts.single_file import check_archive
from milepost.layouts.trio_meta import StateDigest
from milepost.storage.space import human

if TYPE_CHECKING:
    from milepost.layouts.trio import TrioCheckpoint


def verify_trio(
    checkpoint: TrioCheckpoint, *, threads: int, on_bytes: Callable[[int], None] | None
) -> VerifyReport:
    """Digests of the weights, traced to tensors; the archive of the state; stamps.

    The metadata document was checked when the checkpoint was opened.
    """
    problems = [
        *_check_weights(checkpoint, threads, on_bytes),
        *_check_state(checkpoint, on_bytes),
    ]
    if not checkpoint.meta.is_ours:
        message = "no digests are recorded; structure and zip checksums were checked"
        problems.append(
            Problem(severity=Severity.WARNING, file=checkpoint.names.meta, message=message)
        )
    return VerifyReport(
        path=checkpoint.path,
        problems=tuple(problems),
        checked_nbytes=sum(file.nbytes for file in checkpoint.files()),
        has_digests=checkpoint.meta.is_ours,
    )


def _check_weights(
    checkpoint: TrioCheckpoint, threads: int, on_bytes: Callable[[int], None] | None
) -> Iterator[Problem]:
    name = checkpoint.names.weights
    try:
        extents = {checkpoint.weights.path: checkpoint.weights.extents}
    except CheckpointError as error:
        yield Problem(severity=Severity.ERROR, file=name, message=str(error))
        return
    for bad in find_bad_extents(extents, threads=threads, on_bytes=on_bytes):
        yield _traced(checkpoint, bad)


def _traced(checkpoint: TrioCheckpoint, bad: BadExtent) -> Problem:
    name = checkpoint.names.weights
    tensor = tensor_at(checkpoint.header, bad.start, bad.end)
    what = f"tensor {tensor}" if tensor is not None else "the header"
    how = f"cannot be read: {bad.error}" if bad.error else "are not those that were saved"
    return Problem(
        severity=Severity.ERROR,
        file=name,
        message=f"{name}: {what}: bytes {bad.start} to {bad.end} "
        f"({human(bad.end - bad.start)}) {how}",
        tensor=tensor,
    )


def _check_state(
    checkpoint: TrioCheckpoint, on_bytes: Callable[[int], None] | None
) -> Iterator[Problem]:
    name, recorded = checkpoint.names.extra_state, checkpoint.meta.extra_state
    try:
        with checkpoint.opened_state() as (archive, _):
            problems = check_archive(archive, checkpoint.documents.file(name))
            found = StateDigest(nbytes=archive.file.nbytes, digest=archive.recorded_digest or "")
    except UnsafePickleError as error:  # it holds more than plain data, which is no damage
        yield Problem(severity=Severity.WARNING, file=name, message=str(error))
        return
    except CheckpointError as error:
        yield Problem(severity=Severity.ERROR, file=name, message=str(error))
        return
    # Without a record the one warning about the whole trio says that nothing is recorded.
    yield from (p for p in problems if recorded is not None or p.severity is Severity.ERROR)
    if recorded is not None and found != recorded:
        message = f"{name}: it is not the file that was saved with {checkpoint.names.meta}"
        yield Problem(severity=Severity.ERROR, file=name, message=message)
    if on_bytes is not None:
        on_bytes(found.nbytes)
