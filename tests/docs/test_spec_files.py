"""Rules of docs/spec/v1.md about trios and single `.pt` files."""

from __future__ import annotations

import base64
import json
import os
import struct
import zipfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
import xxhash

import milepost as mp
from milepost.errors import (
    CheckpointIncompleteError,
    CheckpointWarning,
    DamagedError,
    FormatError,
    InconsistentError,
    InvalidInputError,
    UnencodableError,
    UnsafePickleError,
    UnsupportedVersionError,
)
from milepost.format.header import read_header
from milepost.layouts.trio import TrioContent, write_trio
from milepost.storage import fileops

Edit: TypeAlias = Callable[[Path, Callable[[dict[str, Any]], None]], None]


def meta_of(trio: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(trio.with_name(f"{trio.name}.meta.json").read_bytes())
    return document


def renames_of(act: Callable[[], object]) -> list[str]:
    """Renames and fsyncs of directories during a call, in order."""
    seen: list[str] = []

    def record(kind: str, target: str, function: Callable[..., Any], arguments: Any) -> Any:
        if kind in ("rename", "fsync-directory"):
            seen.append(target)
        return function(*arguments)

    with fileops.hooked(record):
        act()
    return seen


# ---- trio


@pytest.mark.spec("v1#trio-1")
def test_the_three_files_carry_the_same_stamps(trio: Path) -> None:
    meta = meta_of(trio)
    marks = read_header(trio.with_name("latest.safetensors")).metadata
    state = torch.load(trio.with_name("latest.extra_state.pt"), weights_only=True)
    assert marks == {"format": "pt", "save_id": meta["save_id"], "epoch": "2"}
    assert (state["save_id"], state["epoch"]) == (meta["save_id"], 2)


@pytest.mark.spec("v1#trio-1")
@pytest.mark.parametrize("file", ["latest.safetensors", "latest.extra_state.pt"])
def test_files_of_two_saves_are_never_combined(trio: Path, file: str) -> None:
    older = trio.with_name(file).read_bytes()
    write_trio(trio.parent, ["latest"], TrioContent(model_state={"w": torch.ones(1)}, epoch=2))
    trio.with_name(file).write_bytes(older)
    with pytest.raises(InconsistentError, match="inconsistent files: save_id"):
        mp.load_checkpoint(trio)


@pytest.mark.spec("v1#trio-2", "v1#commit-1")
def test_all_names_of_a_save_change_through_one_record(tmp_path: Path) -> None:
    torch.save({"model_state": {"w": torch.zeros(1)}, "epoch": 1}, tmp_path / "best.pt")
    content = TrioContent(model_state={"w": torch.ones(1)})
    done = renames_of(lambda: write_trio(tmp_path, ["latest", "best"], content))
    renames = [target for target in done if " -> " in target]
    record = f"{tmp_path / '.milepost-intent.json'}"
    assert renames[0].endswith(f"-> {record}")
    assert len(renames) == 1 + 2 * 3
    assert not (tmp_path / "best.pt").exists()
    files = [tmp_path / f"{stem}.meta.json" for stem in ("latest", "best")]
    assert files[0].samefile(files[1])
    assert files[0].stat().st_mode & 0o777 == 0o444


@pytest.mark.spec("v1#trio-3")
@pytest.mark.parametrize("suffix", [".safetensors", ".meta.json", ".extra_state.pt"])
def test_one_file_of_a_trio_wins_over_an_older_pt(trio: Path, suffix: str) -> None:
    torch.save({"model_state": {"w": torch.zeros(1)}}, trio.with_name("latest.pt"))
    for other in {".safetensors", ".meta.json", ".extra_state.pt"} - {suffix}:
        trio.with_name(f"latest{other}").unlink()
    with pytest.raises(CheckpointIncompleteError, match="is missing"):
        mp.Checkpoint.open(trio.with_name("latest.pt"))


@pytest.mark.spec("v1#trio-4")
@pytest.mark.parametrize(
    ("loss", "best_loss", "texts"),
    [
        (float("nan"), float("inf"), {"loss": "nan"}),
        (0.5, float("-inf"), {"best_loss": "-inf"}),
        (float("inf"), 0.25, {"loss": "inf"}),
        (None, None, {}),
    ],
)
def test_losses_that_are_not_finite_are_null_with_their_text(
    tmp_path: Path, loss: float | None, best_loss: float | None, texts: dict[str, str]
) -> None:
    content = TrioContent(model_state={"w": torch.ones(1)}, loss=loss, best_loss=best_loss)
    write_trio(tmp_path, ["x"], content)
    meta = meta_of(tmp_path / "x")
    assert meta["milepost"]["nonfinite"] == texts
    for name in texts:
        assert meta[name] is None
    info = mp.Checkpoint.open(tmp_path / "x").info
    expected = float("inf") if best_loss is None else best_loss
    assert str((info.loss, info.best_loss)) == str((loss, expected))


@pytest.mark.spec("v1#trio-5")
def test_the_digests_of_the_weights_are_those_of_their_extents(trio: Path) -> None:
    path = trio.with_name("latest.safetensors")
    recorded = meta_of(trio)["milepost"]["digests"]["safetensors"]
    header = read_header(path)
    ends = [header.data_start + tensor.end for tensor in header.tensors.values()]
    borders = sorted({0, header.data_start, *ends})
    data, records, found = path.read_bytes(), b"", b""
    for start, end in pairwise(borders):
        digest = xxhash.xxh3_128_digest(data[start:end])
        found += digest
        records += struct.pack("<16sQQ", digest, start, end - start)
    assert recorded == {
        "nbytes": len(data),
        "root": xxhash.xxh3_128_hexdigest(records),
        "extents": base64.b64encode(found).decode(),
    }


@pytest.mark.spec("v1#trio-6")
@pytest.mark.parametrize("harm", ["missing", "damaged"])
def test_weights_are_read_without_the_state_and_training_does_not_go_on(
    trio: Path, harm: str
) -> None:
    state = trio.with_name("latest.extra_state.pt")
    if harm == "missing":
        state.unlink()
    else:
        os.truncate(state, 100)
    with pytest.warns(CheckpointWarning, match=r"latest\.extra_state\.pt: not usable"):
        loaded = mp.load_checkpoint(trio)
    assert loaded["epoch"] == 2
    assert "optimizer" not in loaded
    with pytest.raises(DamagedError):
        mp.Checkpoint.open(trio).training_state()


@pytest.mark.spec("v1#trio-7")
def test_infinity_is_read_from_a_document_that_is_not_ours(trio: Path) -> None:
    path = trio.with_name("latest.meta.json")
    meta = meta_of(trio)
    plain = {"epoch": 2, "best_loss": float("inf"), "save_id": meta["save_id"]}
    path.write_text(json.dumps(plain))
    assert mp.Checkpoint.open(trio).info.best_loss == float("inf")
    path.write_text(json.dumps({**meta, "best_loss": float("inf")}))
    with pytest.raises(FormatError):
        mp.Checkpoint.open(trio)


@pytest.mark.spec("v1#version-4")
def test_versions_of_a_trio_above_2_are_refused_and_none_means_2(trio: Path, edit: Edit) -> None:
    path = trio.with_name("latest.meta.json")
    edit(path, lambda meta: meta.update(format_version="2.9", later=1))
    assert mp.Checkpoint.open(trio).info.format_version == "2.9"
    edit(path, lambda meta: meta.pop("format_version"))
    assert mp.Checkpoint.open(trio).info.format_version == "2.0"
    edit(path, lambda meta: meta.update(format_version="3.0"))
    with pytest.raises(UnsupportedVersionError, match=r"format version 3\.0"):
        mp.Checkpoint.open(trio)


# ---- single file


@pytest.mark.spec("v1#single-1")
@pytest.mark.parametrize("name", ["optimizer", "metadata"])
def test_names_that_the_file_uses_are_not_free_for_metadata(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidInputError, match=f"metadata '{name}'"):
        mp.save_checkpoint(tmp_path / "x.pt", {"w": torch.ones(1)}, **{name: 1})


@pytest.mark.spec("v1#single-2")
def test_what_torch_would_not_load_safely_is_refused(tmp_path: Path) -> None:
    for value in (Path("x"), frozenset({1}), range(3), b""):
        with pytest.raises(UnencodableError, match=r"metadata\.thing"):
            mp.save_checkpoint(tmp_path / "x.pt", {"w": torch.ones(1)}, thing=value)
    assert os.listdir(tmp_path) == []
    mp.save_checkpoint(tmp_path / "x.pt", {"w": torch.ones(1)}, {"state": {}}, step=(1, {2}, b"x"))
    loaded = torch.load(tmp_path / "x.pt", weights_only=True)
    assert list(loaded) == ["model_state", "optimizer", "metadata", "step"]
    assert loaded["step"] == loaded["metadata"]["step"] == (1, {2}, b"x")


@pytest.mark.spec("v1#single-3")
def test_the_file_ends_with_the_digest_of_what_precedes_it(tmp_path: Path, trio: Path) -> None:
    mp.save_checkpoint(tmp_path / "x.pt", {"w": torch.ones(1)})
    for path in (tmp_path / "x.pt", trio.with_name("latest.extra_state.pt")):
        raw = path.read_bytes()
        with zipfile.ZipFile(path) as archive:
            comment = archive.comment
        assert raw.endswith(comment)
        digest = xxhash.xxh3_128_hexdigest(raw[:-50])
        assert comment == b"milepost xxh3-128:" + digest.encode()
    assert meta_of(trio)["milepost"]["digests"]["extra_state"] == {
        "nbytes": len(raw),
        "digest": digest,
    }


@pytest.mark.spec("v1#single-4")
def test_a_single_file_appears_with_one_rename(tmp_path: Path, trio: Path) -> None:
    path = tmp_path / "x.pt"
    done = renames_of(lambda: mp.save_checkpoint(path, {"w": torch.ones(1)}))
    source, _, target = done[0].partition(" -> ")
    assert Path(source).name.startswith(".x.pt.milepost-")
    assert (target, done[1:]) == (str(path), [str(tmp_path)])
    mp.save_checkpoint(trio.with_name("latest.pt"), {"w": torch.ones(1)})
    assert [p.name for p in tmp_path.glob("latest.*")] == ["latest.pt"]


@pytest.mark.spec("v1#single-5")
def test_a_pickle_that_wants_code_is_refused_by_name(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return os.system, (f"touch {tmp_path}/sprung",)

    torch.save({"model_state": {"w": torch.ones(1)}, "trap": Trap()}, tmp_path / "x.pt")
    with pytest.raises(UnsafePickleError, match=r"posix\.system") as caught:
        mp.load_checkpoint(tmp_path / "x.pt")
    assert caught.value.global_name == "posix.system"
    assert not (tmp_path / "sprung").exists()


@pytest.mark.spec("v1#limit-2")
def test_a_tree_of_more_than_200_levels_is_refused(tmp_path: Path) -> None:
    value: list[Any] = []
    for _ in range(200):
        value = [value]
    torch.save({"model_state": {"w": torch.ones(1)}, "deep": value}, tmp_path / "x.pt")
    with pytest.raises(FormatError, match="nested deeper than 200 levels"):
        mp.load_checkpoint(tmp_path / "x.pt")
