"""A changed byte anywhere in a trio is found, and named."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from milepost.errors import DamagedError, DigestMismatchError, UnsupportedVersionError
from milepost.layouts.checkpoint import Problem, Severity
from milepost.layouts.trio import TrioCheckpoint, TrioContent, write_trio

STATE = {"a.weight": torch.arange(64.0), "b.weight": torch.arange(8).view(2, 4), "c": torch.ones(3)}
OPTIMIZER = {"state": {0: {"exp_avg": torch.ones(16), "step": torch.tensor(3.0)}}}


@pytest.fixture
def trio(tmp_path: Path) -> Path:
    content = TrioContent(
        model_state=STATE, optimizer_state=OPTIMIZER, epoch=3, loss=0.5, model_config={"d": 8}
    )
    write_trio(tmp_path, ["latest"], content)
    return tmp_path / "latest"


def problems(path: Path) -> list[Problem]:
    """What opening and verifying find."""
    try:
        return list(TrioCheckpoint(path).verify().problems)
    except (DamagedError, UnsupportedVersionError) as error:
        name = Path(error.path or "").name
        return [Problem(severity=Severity.ERROR, file=name, message=str(error))]


def flipped(path: Path, step: int) -> Iterator[int]:
    """Change one bit of each `step`-th byte of the file in turn, and put it back."""
    raw = path.read_bytes()
    for place in range(0, len(raw), step):
        changed = bytearray(raw)
        changed[place] ^= 1 << (place % 8)
        path.write_bytes(changed)
        yield place
    path.write_bytes(raw)


@pytest.mark.case("C1.1")
@pytest.mark.parametrize(
    ("suffix", "step"), [(".safetensors", 3), (".meta.json", 1), (".extra_state.pt", 5)]
)
def test_every_flipped_byte_is_found(trio: Path, suffix: str, step: int) -> None:
    missed = [
        place
        for place in flipped(trio.with_name(f"latest{suffix}"), step)
        if not any(problem.severity is Severity.ERROR for problem in problems(trio))
    ]
    assert missed == []
    assert problems(trio) == []


@pytest.mark.case("C1.1")
def test_a_flipped_weight_names_its_tensor(trio: Path) -> None:
    header = TrioCheckpoint(trio).header
    path = trio.with_name("latest.safetensors")
    for name, entry in header.tensors.items():
        raw = bytearray(path.read_bytes())
        raw[header.data_start + entry.start + 5] ^= 4
        path.write_bytes(raw)
        assert [problem.tensor for problem in problems(trio)] == [name]
        checkpoint = TrioCheckpoint(trio)
        with pytest.raises(DigestMismatchError, match=rf"latest\.safetensors: tensor {name}"):
            checkpoint.read_weights()
        with pytest.raises(DigestMismatchError, match=name):
            checkpoint.read(name)
        others = [other for other in header.tensors if other != name]
        assert set(checkpoint.read_weights(others)) == set(others)
        raw[header.data_start + entry.start + 5] ^= 4
        path.write_bytes(raw)
    assert TrioCheckpoint(trio).verify().ok


@pytest.mark.case("C1.1")
def test_a_flipped_byte_of_the_optimizer_is_refused_at_load_and_named(trio: Path) -> None:
    path = trio.with_name("latest.extra_state.pt")
    raw = bytearray(path.read_bytes())
    at = raw.index(torch.ones(16).numpy().tobytes())
    raw[at + 2] ^= 1
    path.write_bytes(raw)
    with pytest.raises(DamagedError, match=r"latest\.extra_state\.pt.*exp_avg"):
        TrioCheckpoint(trio).training_state()
    found = {problem.tensor for problem in problems(trio)}
    assert "optimizer_state.state.0.exp_avg" in found
    assert torch.equal(TrioCheckpoint(trio).read_weights()["c"], STATE["c"])


def test_a_training_state_that_is_sound_but_another_is_found(trio: Path, tmp_path: Path) -> None:
    path = trio.with_name("latest.extra_state.pt")
    state = torch.load(path, weights_only=True)
    state["optimizer_state"]["state"][0]["exp_avg"] += 1
    torch.save(state, path)
    assert any("not the file that was saved" in problem.message for problem in problems(trio))
    with pytest.raises(DigestMismatchError, match=r"latest\.meta\.json records"):
        TrioCheckpoint(trio).training_state()


def test_weights_that_were_rewritten_by_another_program_are_found(trio: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = trio.with_name("latest.safetensors")
    marks = dict(TrioCheckpoint(trio).header.metadata)
    save_file({name: t + 1 for name, t in load_file(path).items()}, path, metadata=marks)
    with pytest.raises(DamagedError, match=r"latest\.safetensors"):
        TrioCheckpoint(trio).read_weights()
    assert problems(trio)


def test_verify_reports_progress_in_bytes(trio: Path) -> None:
    seen: list[int] = []
    report = TrioCheckpoint(trio).verify(threads=2, on_bytes=seen.append)
    nbytes = sum(
        trio.with_name(f"latest{s}").stat().st_size for s in (".safetensors", ".meta.json")
    )
    assert report.ok and report.has_digests
    assert report.checked_nbytes == nbytes + trio.with_name("latest.extra_state.pt").stat().st_size
    assert sum(seen) > 0
