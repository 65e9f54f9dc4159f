"""A fault at every file operation of a save of three files under several names."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch

import milepost as mp
from milepost.errors import NotFoundError, RunInUseError
from milepost.layouts.single_file import write_single_file
from milepost.layouts.trio import TrioCheckpoint, TrioContent, remove_trio, trio_names, write_trio
from milepost.testing.faults import Ending, Fault, FaultPlan, Operation, lacking, record
from milepost.testing.forked import run_with_fault, standing_still
from milepost.testing.matrix import Attempt, CrashMatrix
from milepost.testing.power import PowerLoss
from tests.crash.proven import Proven, files_in

Found: TypeAlias = dict[str, int]
"""What a directory holds: by name, the epoch that its tensors were made from."""

Record: TypeAlias = tuple[Sequence[Operation], int]
CheckDisk: TypeAlias = Callable[[PowerLoss, Path], None]
CutPower: TypeAlias = Callable[[CrashMatrix, Iterable[Record], CheckDisk], None]
Explore: TypeAlias = Callable[[CrashMatrix, Callable[[Attempt], None]], None]

STEMS = ("epoch_1", "epoch_2", "epoch_3", "latest", "best", "next")
LOCK = ".milepost.lock"
ONE_THREAD = mp.WriteOptions(threads=1)


def weights(epoch: int) -> dict[str, torch.Tensor]:
    return {
        "wide": torch.arange(6.0) * epoch,
        "frozen": torch.full((2, 3), float(epoch)),
        "counts": torch.arange(4) + epoch,
    }


def moments(epoch: int) -> dict[str, Any]:
    slots = {"step": torch.tensor(1.0), "exp_avg": torch.full((6,), 0.1 * epoch)}
    return {"state": {0: slots}, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}


def content(epoch: int) -> TrioContent:
    return TrioContent(
        model_state=weights(epoch), optimizer_state=moments(epoch), epoch=epoch, loss=0.5
    )


def save(root: Path, names: list[str], epoch: int) -> None:
    write_trio(root, names, content(epoch), ONE_THREAD)


def save_without_links(root: Path, names: list[str], epoch: int) -> None:
    with lacking("link"):
        save(root, names, epoch)


def save_single(root: Path, name: str, epoch: int) -> None:
    write_single_file(root / f"{name}.pt", weights(epoch), moments(epoch), {"epoch": epoch})


def found(root: Path) -> Found:
    """What is there under each name; each is proven by its digests and is bit for bit one save."""
    epochs: Found = {}
    for stem in STEMS:
        path = root / f"{stem}.pt"  # a trio of the name counts before such a file
        try:
            checkpoint = mp.Checkpoint.open(path)
        except NotFoundError:
            continue
        files = files_in(root)  # a record may say that one of them has the name
        if isinstance(checkpoint, TrioCheckpoint):
            files = [place.path for place in checkpoint.documents.places.values()]
        epochs[stem] = _proven.of(files, root, stem, partial(proven_epoch, checkpoint, path))
    return epochs


_proven: Proven[int] = Proven()


def proven_epoch(checkpoint: mp.Checkpoint, path: Path) -> int:
    report = checkpoint.verify()
    assert report.has_digests and not report.problems, report.problems
    loaded = mp.load_checkpoint(path)
    epoch = loaded["epoch"]
    assert isinstance(epoch, int)
    wanted = weights(epoch)
    assert wanted.keys() == loaded["model_state"].keys()
    assert all(torch.equal(wanted[name], loaded["model_state"][name]) for name in wanted)
    exp_avg = loaded["optimizer"]["state"][0]["exp_avg"]
    assert torch.equal(exp_avg, moments(epoch)["state"][0]["exp_avg"])
    return epoch


def leftovers(root: Path) -> set[str]:
    return {name for name in os.listdir(root) if name.startswith(".")} - {LOCK}


# ---- what is tried


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    prepare: Callable[[Path], object]
    action: Callable[[Path], object]
    before: Found
    after: Found


def _linked(root: Path) -> None:
    save(root, ["epoch_1", "latest", "best"], 1)


def _beside_a_file_of_the_name(root: Path) -> None:
    save(root, ["epoch_1"], 1)
    save_single(root, "latest", 3)


def _after_a_kill_amid_the_renames(root: Path) -> None:
    save(root, ["epoch_1", "latest"], 1)
    names = [one.name for one in record(lambda: save(root, ["epoch_1", "latest"], 1))]
    second_of_six = [n for n, name in enumerate(names) if name == "rename"][2]
    plan = FaultPlan(second_of_six, Fault.KILL_BEFORE)
    killed = run_with_fault(lambda: save(root, ["epoch_2", "latest"], 2), plan)
    assert killed.ending is Ending.KILLED


def _after_a_kill_amid_the_writes(root: Path) -> None:
    save(root, ["epoch_1"], 1)
    plan = FaultPlan(12, Fault.KILL_HALFWAY)
    killed = run_with_fault(lambda: save(root, ["epoch_2", "latest"], 2), plan)
    assert killed.ending is Ending.KILLED and leftovers(root)


SCENARIOS = {
    "over names that are links to one save": Scenario(
        prepare=_linked,
        action=lambda root: save(root, ["epoch_2", "latest"], 2),
        before={"epoch_1": 1, "latest": 1, "best": 1},
        after={"epoch_1": 1, "epoch_2": 2, "latest": 2, "best": 1},
    ),
    "where no hard links are": Scenario(
        prepare=_linked,
        action=lambda root: save_without_links(root, ["epoch_2", "latest", "best"], 2),
        before={"epoch_1": 1, "latest": 1, "best": 1},
        after={"epoch_1": 1, "epoch_2": 2, "latest": 2, "best": 2},
    ),
    "over a single file of the name": Scenario(
        prepare=_beside_a_file_of_the_name,
        action=lambda root: save(root, ["latest"], 2),
        before={"epoch_1": 1, "latest": 3},
        after={"epoch_1": 1, "latest": 2},
    ),
    "the first save after a kill amid the renames": Scenario(
        prepare=_after_a_kill_amid_the_renames,
        action=lambda root: save(root, ["epoch_3", "latest"], 3),
        before={"epoch_1": 1, "epoch_2": 2, "latest": 2},
        after={"epoch_1": 1, "epoch_2": 2, "epoch_3": 3, "latest": 3},
    ),
    "the first save after a kill amid the writes": Scenario(
        prepare=_after_a_kill_amid_the_writes,
        action=lambda root: save(root, ["epoch_2"], 3),
        before={"epoch_1": 1},
        after={"epoch_1": 1, "epoch_2": 3},
    ),
    "removing two": Scenario(
        prepare=_linked,
        action=lambda root: remove_trio(root, ["epoch_1", "best"]),
        before={"epoch_1": 1, "latest": 1, "best": 1},
        after={"latest": 1},
    ),
    "a single file over a trio of its name": Scenario(
        prepare=_linked,
        action=lambda root: save_single(root, "latest", 2),
        before={"epoch_1": 1, "latest": 1, "best": 1},
        after={"epoch_1": 1, "latest": 2, "best": 1},
    ),
}


# ---- what must hold at every point


def check_ending(attempt: Attempt, scenario: Scenario, now: Found, before: set[str]) -> None:
    outcome, fault = attempt.outcome, attempt.plan.fault
    assert outcome.struck
    assert now in (scenario.before, scenario.after)
    if fault.kills:
        assert outcome.ending is Ending.KILLED
    elif fault in (Fault.EINTR, Fault.SHORT_WRITE, Fault.SLOW):
        assert outcome.ending is Ending.FINISHED
    if outcome.ending is Ending.FINISHED:
        assert now == scenario.after
    if outcome.ending is not Ending.RAISED:
        return
    assert "StorageError" in outcome.classes
    assert ("untouched" in outcome.message) == (now == scenario.before)
    if now == scenario.before:
        if fault in (Fault.ENOSPC, Fault.EDQUOT):
            assert outcome.error == "NoSpaceError"
        if fault is not Fault.READ_ONLY:
            assert leftovers(attempt.root) <= before


def check_next_save(root: Path, now: Found) -> None:
    """It works and leaves nothing behind of what was cut short."""
    save(root, ["next"], 5)
    assert found(root) == now | {"next": 5}
    visible = {name for name in os.listdir(root) if not name.startswith(".")}
    trios = {name for stem in (*now, "next") for name in trio_names(stem)}
    singles = {f"{stem}.pt" for stem in now}
    assert visible <= trios | singles


def checked(scenario: Scenario, matrix: CrashMatrix) -> Callable[[Attempt], None]:
    before = set(matrix.before.files())

    def check(attempt: Attempt) -> None:
        now = found(attempt.root)
        check_ending(attempt, scenario, now, before)
        check_next_save(attempt.root, now)
        if ".pt.milepost-" not in " ".join(leftovers(attempt.root)):
            assert not leftovers(attempt.root)

    return check


@pytest.mark.case("V16")
@pytest.mark.case("V18")
@pytest.mark.case("V20")
@pytest.mark.case("V24")
@pytest.mark.parametrize("name", SCENARIOS)
def test_at_every_fault_all_names_show_the_old_saves_or_all_show_the_new(
    name: str, scratch: Path, explore: Explore
) -> None:
    scenario = SCENARIOS[name]
    matrix = CrashMatrix(scenario.prepare, scenario.action, scratch=scratch)
    explore(matrix, checked(scenario, matrix))


# ---- power cuts


def checked_disk(before: Found, after: Found) -> CheckDisk:
    def check(loss: PowerLoss, root: Path) -> None:
        now = found(root)
        assert now == after or (now == before and not loss.finished), now
        check_next_save(root, now)

    return check


@pytest.mark.case("V17")
@pytest.mark.parametrize("name", SCENARIOS)
def test_after_a_power_cut_all_names_show_the_old_saves_or_all_show_the_new(
    name: str, scratch: Path, cut_power: CutPower
) -> None:
    scenario = SCENARIOS[name]
    matrix = CrashMatrix(scenario.prepare, scenario.action, scratch=scratch)
    cut_power(matrix, [(matrix.operations, 0)], checked_disk(scenario.before, scenario.after))


@pytest.mark.case("V17")
def test_so_it_is_while_the_next_save_finishes_what_a_kill_cut_short(
    scratch: Path, cut_power: CutPower
) -> None:
    scenario = SCENARIOS["over a single file of the name"]
    matrix = CrashMatrix(scenario.prepare, scenario.action, scratch=scratch)
    moves = [n for n, one in enumerate(matrix.operations) if one.name in ("rename", "exchange")]
    records = [
        (matrix.recovered(nth, lambda root: save(root, ["epoch_2"], 4)), nth)
        for nth in sorted({n + after for n in moves for after in (1, 2)})
    ]
    also = {"epoch_2": 4}

    def check(loss: PowerLoss, root: Path) -> None:
        now = found(root)
        both = (scenario.before | also, scenario.after | also)
        assert now in (both if loss.finished else (scenario.before, scenario.after, *both)), now
        check_next_save(root, now)

    cut_power(matrix, records, check)


# ---- the order of operations


@pytest.mark.case("V17")
def test_files_then_the_record_then_the_names_reach_the_disk(scratch: Path) -> None:
    scenario = SCENARIOS["over names that are links to one save"]
    matrix = CrashMatrix(scenario.prepare, scenario.action, scratch=scratch)
    names = [(one.name, one.target) for one in matrix.operations]
    run = str(scratch / "recorded")
    opened = [t for name, t in names if name == "open" and ".milepost-trio-" in t]
    files = list(dict.fromkeys(opened))  # made first, and opened again when they are written
    assert [file.partition("-0.")[2] for file in files] == [
        "safetensors",
        "extra_state.pt",
        "meta.json",
    ]
    syncs = [names.index(("fsync", file)) for file in files]
    for file, sync in zip(files, syncs, strict=True):
        last_write = len(names) - 1 - names[::-1].index(("write", file))
        assert last_write < sync
    assert syncs[1] < names.index(("open", files[2])), "the metadata holds digests of the others"
    renames = [n for n, (name, _) in enumerate(names) if name == "rename"]
    record_made, moves = renames[0], renames[1:]
    assert names[record_made][1].endswith(f"-> {run}/.milepost-intent.json") and len(moves) == 6
    directory_syncs = [n for n, one in enumerate(names) if one == ("fsync-directory", run)]
    record_gone = names.index(("unlink", f"{run}/.milepost-intent.json"))
    links = [n for n, (name, _) in enumerate(names) if name == "link"]
    assert max(syncs) < min(links) < max(links) < directory_syncs[0] < record_made
    assert record_made < directory_syncs[1] < moves[0]
    assert moves[-1] < directory_syncs[2] < record_gone < directory_syncs[3]


@pytest.mark.case("V18")
def test_space_for_the_weights_is_reserved_before_their_first_byte(scratch: Path) -> None:
    scenario = SCENARIOS["over names that are links to one save"]
    matrix = CrashMatrix(scenario.prepare, scenario.action, scratch=scratch)
    trio = [(n, one) for n, one in enumerate(matrix.operations) if "trio" in one.target]
    reserve = next(n for n, one in trio if one.name == "reserve")
    assert reserve < min(n for n, one in trio if one.name == "write")


def test_a_second_process_is_refused_and_told_who_writes_here(scratch: Path) -> None:
    save(scratch, ["epoch_1", "latest"], 1)
    with standing_still(lambda: save(scratch, ["epoch_2", "latest"], 2), nth=12) as pid:
        with pytest.raises(RunInUseError, match=f"process {pid} on .* is writing checkpoints"):
            save(scratch, ["epoch_3", "latest"], 3)
        assert found(scratch) == {"epoch_1": 1, "latest": 1}
    save(scratch, ["epoch_3", "latest"], 3)
    assert found(scratch) == {"epoch_1": 1, "epoch_3": 3, "latest": 3}
    assert not leftovers(scratch)
