"""Verifying archives: with a digest every changed byte is found, and traced to its tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from milepost.errors import NotFoundError
from milepost.layouts.checkpoint import Severity
from milepost.layouts.torch_archive import TorchArchive, verify_archive, write_archive


def payload() -> dict[str, Any]:
    tied = torch.arange(8.0)
    return {"model": {"embed": tied, "head": tied}, "b": torch.ones(3, dtype=torch.half), "n": 3}


@pytest.mark.case("C1.1")
@pytest.mark.parametrize("change", [0xFF, 0x01, 0x20])
def test_every_changed_byte_is_found(tmp_path: Path, change: int) -> None:
    path = tmp_path / "x.pt"
    write_archive(path, payload())
    raw = path.read_bytes()
    for position in range(len(raw)):
        changed = bytearray(raw)
        changed[position] ^= change
        path.write_bytes(changed)
        problems = verify_archive(path)
        assert any(problem.severity is Severity.ERROR for problem in problems), position


def test_bytes_set_to_zero_and_cut_or_longer_files_are_found(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    write_archive(path, payload())
    raw = path.read_bytes()
    zeroed = [raw[:i] + b"\0" + raw[i + 1 :] for i in range(len(raw)) if raw[i]]
    cut = [raw[:i] for i in range(len(raw))]
    for changed in [*zeroed, *cut, raw + b"x", raw + raw]:
        path.write_bytes(changed)
        assert any(problem.severity is Severity.ERROR for problem in verify_archive(path))


def flipped(path: Path, position: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[position] ^= 0x10
    path.write_bytes(raw)


def test_damage_in_a_tensor_names_every_key_of_it(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    write_archive(path, payload())
    with TorchArchive.open(path) as archive:
        place = archive.storage_record(archive.tree["model"]["embed"].storage).start
    flipped(path, place + 5)
    first, second = verify_archive(path)
    assert "recorded digest" in first.message
    assert second.tensor == "model.embed"
    assert "which holds model.embed, model.head" in second.message


def test_damage_in_another_record_names_the_record(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    write_archive(path, payload())
    with TorchArchive.open(path) as archive:
        place = archive.records[f"{archive.root}/version"].start
    flipped(path, place)
    assert any("archive/version" in problem.message for problem in verify_archive(path))


def test_damage_between_the_records_says_so(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    write_archive(path, payload())
    flipped(path, 5)
    (problem,) = verify_archive(path)
    assert "lies in no record" in problem.message


@pytest.mark.case("C1.1")
def test_a_file_of_stock_torch_is_checked_by_its_zip_checksums(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save(payload(), path)
    (warning,) = verify_archive(path)
    assert warning.severity is Severity.WARNING
    assert "no digest is recorded" in warning.message
    with TorchArchive.open(path) as archive:
        place = archive.storage_record(archive.tree["b"].storage).start
    flipped(path, place)
    with TorchArchive.open(path) as archive:
        (problem,) = archive.check()
    assert (problem.tensor, problem.severity) == ("b", Severity.ERROR)
    assert problem in verify_archive(path)


def test_a_file_written_without_zip_checksums_is_no_damage(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(payload(), path)
    finally:
        torch.serialization.set_crc32_options(True)
    assert [problem.severity for problem in verify_archive(path)] == [Severity.WARNING]


def test_a_pickle_that_is_not_read_is_a_warning_its_bytes_are_still_checked(
    tmp_path: Path,
) -> None:
    path = tmp_path / "x.pt"
    torch.save(nn.Linear(2, 2), path)
    problems = verify_archive(path)
    assert {problem.severity for problem in problems} == {Severity.WARNING}
    assert any("structure was not checked" in problem.message for problem in problems)


def test_a_missing_file_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        verify_archive(tmp_path / "x.pt")
