"""Reading archives of torch.save: torch.load is the oracle, hostile files raise our errors."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import random
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from torch import nn

from milepost.errors import (
    CheckpointError,
    FormatError,
    NotFoundError,
    StorageError,
    UnsafePickleError,
)
from milepost.format.lazy import LazyTensor, Opaque
from milepost.layouts.torch_archive import TorchArchive

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")

Same: TypeAlias = Callable[[Any, Any], None]


class MoEConfig:
    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts


def read(path: Path, **options: Any) -> Any:
    with TorchArchive.open(path, **options) as archive:
        return archive.materialise(archive.tree)


def test_an_archive_is_read_as_torch_reads_it(tmp_path: Path, payload: Any, same: Same) -> None:
    path = tmp_path / "x.pt"
    torch.save(payload, path)
    same(read(path), torch.load(path, weights_only=True, map_location="cpu"))


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_pickle_protocol_is_read(
    tmp_path: Path, payload: Any, same: Same, protocol: int
) -> None:
    path = tmp_path / "x.pt"
    torch.save(payload, path, pickle_protocol=protocol)
    same(read(path), torch.load(path, weights_only=False, map_location="cpu"))


@pytest.mark.case("C4.21")
def test_ties_and_views_share_memory_after_reading(tmp_path: Path) -> None:
    base, tied = torch.arange(6.0), nn.Parameter(torch.ones(2))
    torch.save({"base": base, "view": base[2:], "a": tied, "b": tied}, tmp_path / "x.pt")
    found = read(tmp_path / "x.pt")
    found["base"][3] = 77
    assert found["view"][1] == 77
    assert found["a"] is found["b"]


@pytest.mark.case("C4.22")
def test_the_tree_tells_geometry_without_reading_a_tensor(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"m": {"w": torch.zeros(1000, 10, dtype=torch.bfloat16)[5:, ::2]}}, path)
    with TorchArchive.open(path) as archive:
        lazy = archive.tree["m"]["w"]
        record = archive.storage_record(lazy.storage)
        os.truncate(path, record.start)  # so any read of tensor bytes would fail
        assert isinstance(lazy, LazyTensor)
        assert list(archive.tensors()) == ["m.w"]
        assert (lazy.dtype, lazy.shape, lazy.stride) == ("bfloat16", (995, 5), (10, 2))
        assert (lazy.nbytes, lazy.storage.nbytes, lazy.storage_offset) == (9950, 20000, 50)
        with pytest.raises(FormatError, match="it ends at byte"):
            archive.read_tensor(lazy)


def test_one_tensor_is_read_with_only_the_bytes_that_it_covers(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    base = torch.arange(1000.0)
    tensors = [base[100:110], base[5::100], base[:1].expand(4), base[3:3], nn.Parameter(base)]
    torch.save(tensors, path)
    with TorchArchive.open(path) as archive:
        for lazy, tensor in zip(archive.tree, tensors, strict=True):
            found = archive.read_tensor(lazy)
            assert torch.equal(found, tensor)
            assert type(found) is type(tensor)
            assert found.untyped_storage().nbytes() == 4 * (lazy.span[1] - lazy.span[0])


def test_a_file_replaced_while_open_is_still_read_from_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save(torch.zeros(5), path)
    with TorchArchive.open(path) as archive:
        torch.save(torch.ones(5), tmp_path / "new.pt")
        os.replace(tmp_path / "new.pt", path)
        assert torch.equal(archive.read_tensor(archive.tree), torch.zeros(5))


def test_versions_and_identity_are_told(tmp_path: Path) -> None:
    torch.save(1, tmp_path / "x.pt")
    with TorchArchive.open(tmp_path / "x.pt") as archive:
        assert archive.version is not None and archive.version.isdigit()
        assert archive.serialization_id is not None and len(archive.serialization_id) == 40
        assert (archive.root, archive.tree, archive.recorded_digest) == ("x", 1, None)
        assert archive.check() == []


@pytest.mark.case("C7.31")
def test_a_configuration_class_is_refused_by_name_and_read_as_data_when_allowed(
    tmp_path: Path,
) -> None:
    path, name = tmp_path / "x.pt", f"{MoEConfig.__module__}.MoEConfig"
    torch.save({"config": {"moe_config": MoEConfig(8)}, "w": torch.ones(2)}, path)
    with pytest.raises(UnsafePickleError, match="MoEConfig") as caught:
        TorchArchive.open(path)
    assert caught.value.global_name == name
    assert caught.value.path == str(path)
    found = read(path, allow=[name])["config"]["moe_config"]
    assert isinstance(found, Opaque) and found.fields() == {"num_experts": 8}


@pytest.mark.case("C1.5")
def test_numpy_random_states_and_paths_of_older_files_are_read(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    state: Any = np.random.RandomState(3).get_state()
    torch.save({"rng": state, "dir": Path("runs/a")}, path)
    found = read(path)
    assert str(found["dir"]) == "runs/a"
    np.random.RandomState().set_state(found["rng"])
    assert np.array_equal(found["rng"][1], state[1])


REFUSED: dict[str, Callable[[], Any]] = {
    "module": lambda: nn.Linear(2, 2),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    "sparse": lambda: torch.eye(2).to_sparse(),
    "meta": lambda: torch.empty(2, device="meta"),
    "function": lambda: torch.load,
    "generator": lambda: random.Random(1),
}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("name", list(REFUSED))
def test_what_is_more_than_data_is_refused_by_name(tmp_path: Path, name: str) -> None:
    torch.save(REFUSED[name](), tmp_path / "x.pt")
    with pytest.raises(UnsafePickleError, match=r"x\.pt: the pickle wants"):
        TorchArchive.open(tmp_path / "x.pt")


class Evil:
    def __init__(self, function: Any, *args: Any) -> None:
        self.pair = (function, args)

    def __reduce__(self) -> Any:
        return self.pair


def test_a_whole_module_says_what_to_save_instead(tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 2), tmp_path / "x.pt")
    with pytest.raises(UnsafePickleError, match=r"torch.nn.modules.linear.Linear .*state_dict"):
        TorchArchive.open(tmp_path / "x.pt")


def test_a_malicious_archive_leaves_no_trace(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    inner = io.BytesIO()
    torch.save(Evil(os.system, f"touch {marker}"), inner)
    for function, argument in [
        (os.system, f"touch {marker}"),
        (eval, f"open({str(marker)!r}, 'w')"),
        (torch.load, io.BytesIO(inner.getvalue())),
        (pickle.loads, pickle.dumps(Evil(os.system, f"touch {marker}"))),
        (torch.storage._load_from_bytes, inner.getvalue()),
    ]:
        torch.save({"w": torch.ones(2), "x": Evil(function, argument)}, tmp_path / "x.pt")
        with pytest.raises(UnsafePickleError):
            TorchArchive.open(tmp_path / "x.pt")
        assert not marker.exists()


def rewritten(path: Path, change: dict[str, bytes | None], method: int = 0) -> None:
    """The archive with some records replaced (None: left out)."""
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    root = next(iter(records)).partition("/")[0]
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in records.items():
            new = change.get(name.removeprefix(f"{root}/"), data)
            if new is not None:
                archive.writestr(name, new)
        for name in change.keys() - {n.removeprefix(f"{root}/") for n in records}:
            archive.writestr(f"{root}/{name}", change[name] or b"")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data/0": None}, "bytes of storage '0' are missing"),
        ({"data/0": b"short"}, "storage '0' wants 40 bytes, its record has 5"),
        ({"data.pkl": None}, "not one of torch.save"),
        ({"data.pkl": b""}, "not a well-formed pickle"),
        ({"byteorder": b"big"}, "byte order is 'big'"),
        ({"constants.pkl": b""}, "TorchScript"),
    ],
)
def test_archives_that_do_not_hang_together_are_refused(
    tmp_path: Path, change: dict[str, bytes | None], message: str
) -> None:
    path = tmp_path / "x.pt"
    torch.save(torch.ones(10), path)
    rewritten(path, change)
    with pytest.raises(FormatError, match=message):
        TorchArchive.open(path)


def test_files_that_are_no_archive_say_what_they_are(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    cases: dict[str, Any] = {
        r"empty \(0 bytes\)": b"",
        "a zip file is expected": b"hello world",
        "bare pickle": pickle.dumps({"a": 1}),
        "zip directory at its end is missing": b"PK\x03\x04" + b"\0" * 50,
    }
    for message, raw in cases.items():
        path.write_bytes(raw)
        with pytest.raises(FormatError, match=message):
            TorchArchive.open(path)
    torch.save({"a": torch.ones(2)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(FormatError, match=r"before 1\.6.*convert it with torch"):
        TorchArchive.open(path)
    torch.save(torch.ones(3), path)
    rewritten(path, {}, zipfile.ZIP_DEFLATED)
    with pytest.raises(FormatError, match="is compressed"):
        TorchArchive.open(path)
    path.write_bytes(path.read_bytes() + b"tail")
    with pytest.raises(FormatError):
        TorchArchive.open(path)
    with pytest.raises(FormatError, match="a directory"):
        TorchArchive.open(tmp_path)
    with pytest.raises(NotFoundError):
        TorchArchive.open(tmp_path / "nothing.pt")


@pytest.mark.case("C1.4")
def test_a_file_cut_anywhere_raises_our_error(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"w": torch.arange(20.0), "n": 3}, path)
    raw = path.read_bytes()
    for nbytes in range(0, len(raw), 7):
        path.write_bytes(raw[:nbytes])
        with pytest.raises(FormatError):
            TorchArchive.open(path)


@pytest.mark.parametrize("seed", range(8))
def test_a_mutated_archive_only_raises_our_errors(tmp_path: Path, seed: int) -> None:
    rng, path = random.Random(seed), tmp_path / "x.pt"
    torch.save({"w": torch.arange(6.0), "p": nn.Parameter(torch.ones(2)), "d": torch.half}, path)
    raw = path.read_bytes()
    start = raw.index(b"\x80\x02")
    for round_number in range(250):
        changed = bytearray(raw)
        low, high = (start, start + 300) if round_number % 2 else (0, len(raw))
        for _ in range(rng.randint(1, 5)):
            changed[rng.randrange(low, high)] = rng.randrange(256)
        path.write_bytes(changed)
        with contextlib.suppress(CheckpointError):
            read(path)


def test_hostile_geometry_is_refused_before_memory_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save(torch.ones(10), path)
    with zipfile.ZipFile(path) as archive:
        pkl = archive.read("x/data.pkl")
    ten = b"K\n\x85"
    assert pkl.count(ten) == 1
    huge = b"\x8a\x08" + struct.pack("<q", 2**62) + b"\x85"
    for shape in (b"K\x0b\x85", huge, b"J\xff\xff\xff\xff\x85", b"K\nK\x01\x86", b"N\x85"):
        rewritten(path, {"data.pkl": pkl.replace(ten, shape)})
        with pytest.raises(FormatError):
            TorchArchive.open(path)


def test_an_unreadable_file_is_a_storage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> int:
        raise OSError(5, "Input/output error")

    torch.save(torch.ones(3), tmp_path / "x.pt")
    with TorchArchive.open(tmp_path / "x.pt") as archive:
        monkeypatch.setattr(os, "preadv", refuse)
        with pytest.raises(StorageError, match="Input/output error while reading"):
            archive.read_tensor(archive.tree)


def test_listing_and_verifying_an_archive_needs_no_torch(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3), "n": [torch.half]}, tmp_path / "x.pt")
    code = (
        "import sys\n"
        "from milepost.layouts.torch_archive import TorchArchive, verify_archive\n"
        "archive = TorchArchive.open(sys.argv[1])\n"
        "assert archive.tree['w'].shape == (3,) and archive.check() == []\n"
        "assert len(verify_archive(sys.argv[1])) == 1\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "x.pt")], check=True)
