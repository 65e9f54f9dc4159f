"""Writing archives: what is written loads everywhere, what would not load is refused before."""

from __future__ import annotations

import collections
import dataclasses
import enum
import errno
import io
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pytest
import torch
import xxhash
from torch import nn

from milepost.errors import ExistsError, NoSpaceError, StorageError, UnencodableError
from milepost.layouts.torch_archive import (
    TorchArchive,
    check_loadable,
    verify_archive,
    write_archive,
)
from milepost.storage import fileops

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")

Same: TypeAlias = Callable[[Any, Any], None]


def read(path: Path) -> Any:
    with TorchArchive.open(path) as archive:
        return archive.materialise(archive.tree)


class Stage(enum.Enum):
    SFT = "sft"


class Sub(torch.Tensor):
    pass


class Pair(NamedTuple):
    a: int
    b: int


@dataclasses.dataclass
class MoEConfig:
    num_experts: int = 4


def test_what_is_written_loads_in_stock_torch_and_here(
    tmp_path: Path, payload_name: str, payload: Any, same: Same
) -> None:
    path = tmp_path / "x.pt"
    written = write_archive(path, payload)
    raw = path.read_bytes()
    stock = torch.load(path, weights_only=True)
    same(read(path), stock)
    same(torch.load(io.BytesIO(raw), weights_only=True), stock)
    same(torch.load(path, weights_only=True, mmap=True), stock)
    if payload_name not in ("conjugate", "expanded"):  # these hide a base
        plain = io.BytesIO()
        torch.save(payload, plain)
        plain.seek(0)
        same(stock, torch.load(plain, weights_only=True))
    assert written.nbytes == len(raw)
    assert verify_archive(path) == []


def test_the_digest_covers_every_byte_before_the_comment(tmp_path: Path) -> None:
    written = write_archive(tmp_path / "x.pt", {"w": torch.ones(5)})
    raw = (tmp_path / "x.pt").read_bytes()
    assert raw[-50:] == b"milepost xxh3-128:" + written.digest.encode()
    assert xxhash.xxh3_128(raw[:-50]).hexdigest() == written.digest
    with TorchArchive.open(tmp_path / "x.pt") as archive:
        assert archive.recorded_digest == written.digest
    with zipfile.ZipFile(tmp_path / "x.pt") as archive_of_python:
        assert archive_of_python.testzip() is None


@pytest.mark.case("C7.34")
def test_views_do_not_write_the_base_that_they_hide(tmp_path: Path) -> None:
    base = torch.randn(1000, 1000)
    row = base[3]
    payload = {
        "row": row,
        "same object": row,
        "equal view": base[3],
        "columns": base[:, ::500],
        "expanded": base[:1, :1].expand(50, 60),
        "none": base[5:5],
        "parameter": nn.Parameter(base[7]),
    }
    written = write_archive(tmp_path / "x.pt", payload)
    assert written.nbytes < 30_000
    found = torch.load(tmp_path / "x.pt", weights_only=True)
    for name, tensor in payload.items():
        assert torch.equal(found[name], tensor), name
    assert found["row"] is found["same object"]
    assert found["row"].data_ptr() == found["equal view"].data_ptr()
    assert found["expanded"].stride() == (0, 0)
    assert type(found["parameter"]) is nn.Parameter and found["parameter"].requires_grad


@pytest.mark.case("C4.21")
def test_ties_and_views_of_a_saved_base_are_written_once(tmp_path: Path) -> None:
    weight = torch.randn(256, 256)
    payload = {"embed": weight, "head": weight.detach(), "part": weight[10:20]}
    written = write_archive(tmp_path / "x.pt", payload)
    assert written.nbytes < weight.nbytes + 4000
    found = torch.load(tmp_path / "x.pt", weights_only=True)
    assert found["embed"].data_ptr() == found["head"].data_ptr()
    assert found["part"].data_ptr() == found["embed"][10:].data_ptr()


def test_one_memory_seen_as_two_dtypes_is_written(tmp_path: Path) -> None:
    floats = torch.randn(8)
    write_archive(tmp_path / "x.pt", [floats, floats.view(torch.int32)])
    found = torch.load(tmp_path / "x.pt", weights_only=True)
    assert torch.equal(found[0].view(torch.int32), found[1])


def test_the_payload_itself_is_left_alone(tmp_path: Path) -> None:
    base = nn.Parameter(torch.randn(10, 10))
    state: dict[str, Any] = {"a": base[2], "b": [base], "c": collections.OrderedDict(x=base)}
    write_archive(tmp_path / "x.pt", state)
    assert state["a"].untyped_storage().nbytes() == 400
    assert state["b"][0] is base is state["c"]["x"]


def _cycle() -> Any:
    cycle: list[Any] = []
    cycle.append(cycle)
    return cycle


def _deep() -> Any:
    deep: list[Any] = []
    for _ in range(300):
        deep = [deep]
    return deep


def _tagged() -> Any:
    tagged = torch.ones(2)
    vars(tagged)["origin"] = Path("x")
    return tagged


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "path": (lambda: Path("a"), "save str(value)"),
    "array": (lambda: np.zeros(3), "save torch.from_numpy(value)"),
    "numpy float": (lambda: np.float64(1.5), "save value.item()"),
    "numpy int": (lambda: np.int64(1), "save value.item()"),
    "enum": (lambda: Stage.SFT, "save value.value"),
    "dataclass": (lambda: MoEConfig(), "save dataclasses.asdict(value)"),
    "module": (lambda: nn.Linear(1, 1), "save value.state_dict()"),
    "named tuple": (lambda: Pair(1, 2), "save tuple(value)"),
    "default dict": (lambda: collections.defaultdict(list), "save dict(value)"),
    "frozen set": (lambda: frozenset([1]), "save set(value)"),
    "deque": (lambda: collections.deque(), "save"),
    "range": (lambda: range(3), "save"),
    "function": (lambda: print, "save"),
    "empty bytes": (lambda: b"", "torch refuses empty bytes"),
    "huge integer": (lambda: 2**3000, "save str(value)"),
    "sparse": (lambda: torch.eye(2).to_sparse(), "to_dense"),
    "meta": (lambda: torch.empty(1, device="meta"), "no data"),
    "subclass": (lambda: torch.ones(1).as_subclass(Sub), "tensor subclass"),
    "quantized": (
        lambda: torch.quantize_per_tensor(torch.ones(1), 1, 0, torch.qint8),
        "dequantize",
    ),
    "attribute": (_tagged, "origin: pathlib"),
    "cycle": (_cycle, "contains itself"),
    "deep": (_deep, "nested deeper"),
}

READ_BY_TORCH = {"sparse", "meta", "quantized", "cycle", "deep"}  # but not by our own reader


@pytest.mark.case("C1.5")
@pytest.mark.case("C7.31")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("name", list(REFUSED))
def test_what_could_not_be_loaded_again_is_refused_with_its_key(tmp_path: Path, name: str) -> None:
    make, advice = REFUSED[name]
    value = make()
    with pytest.raises(UnencodableError) as caught:
        write_archive(tmp_path / "x.pt", {"extra": {"list": [1, value]}})
    assert caught.value.key.startswith("extra.list.1")
    assert advice in str(caught.value)
    assert not (tmp_path / "x.pt").exists()


def test_every_refused_place_is_named_at_once() -> None:
    payload = {"a": Path("x"), "b": [np.float64(1)], "c": {Stage.SFT: 1}}
    with pytest.raises(UnencodableError, match="3 values") as caught:
        check_loadable(payload)
    for place in ("a: ", "b.0: ", "c.<key <Stage>>: "):
        assert place in str(caught.value)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("name", sorted(REFUSED.keys() - READ_BY_TORCH))
def test_torch_refuses_what_is_refused_here(tmp_path: Path, name: str) -> None:
    value = REFUSED[name][0]()
    with pytest.raises(Exception):  # noqa: B017
        torch.save(value, tmp_path / "x.pt")
        torch.load(tmp_path / "x.pt", weights_only=True)


def test_a_name_that_is_taken_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    path.write_bytes(b"mine")
    with pytest.raises((ExistsError, StorageError)):
        write_archive(path, {"a": 1})
    assert path.read_bytes() == b"mine"


def operations(path: Path, payload: Any) -> list[str]:
    seen: list[str] = []

    def record(operation: str, target: str, function: Any, arguments: Any) -> Any:
        seen.append(operation)
        return function(*arguments)

    with fileops.hooked(record):
        write_archive(path, payload)
    return seen


def test_data_is_synced_after_the_last_write(tmp_path: Path) -> None:
    seen = operations(tmp_path / "x.pt", {"w": torch.ones(100)})
    assert (seen[0], seen[-1]) == ("open", "fsync")
    assert set(seen[1:-1]) == {"write"}


@pytest.mark.case("C7.30")
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_failure_of_any_operation_is_one_error_and_leaves_nothing(
    tmp_path: Path, number: int
) -> None:
    payload = {"w": torch.ones(100), "v": torch.zeros(5)}
    count = len(operations(tmp_path / "whole.pt", payload))
    wanted = NoSpaceError if number == errno.ENOSPC else StorageError
    for failing in range(count):
        left = [failing]

        def fail(
            operation: str, target: str, function: Any, arguments: Any, left: list[int] = left
        ) -> Any:
            left[0] -= 1
            if left[0] == -1:
                raise OSError(number, "refused")
            return function(*arguments)

        with fileops.hooked(fail), pytest.raises(wanted):
            write_archive(tmp_path / "x.pt", payload)
        assert not (tmp_path / "x.pt").exists()


def test_short_writes_are_continued(tmp_path: Path) -> None:
    def short(operation: str, target: str, function: Any, arguments: Any) -> Any:
        if operation == "write":
            descriptor, view, offset = arguments
            return function(descriptor, view[:7], offset)
        return function(*arguments)

    with fileops.hooked(short):
        write_archive(tmp_path / "x.pt", {"w": torch.arange(50)})
    assert verify_archive(tmp_path / "x.pt") == []
    assert torch.equal(read(tmp_path / "x.pt")["w"], torch.arange(50))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tensors_of_a_gpu_are_written_as_cpu_tensors(tmp_path: Path) -> None:
    base = torch.arange(10_000.0, device="cuda")
    other = torch.arange(6.0, device="cuda")
    payload = {"view": base[5:9], "a": other, "b": other.detach(), "part": other[2:]}
    write_archive(tmp_path / "x.pt", payload)
    found = torch.load(tmp_path / "x.pt", weights_only=True)
    for name, tensor in payload.items():
        assert found[name].device.type == "cpu"
        assert torch.equal(found[name], tensor.cpu())
    assert found["a"].data_ptr() == found["b"].data_ptr() == found["part"].data_ptr() - 8
    assert found["view"].untyped_storage().nbytes() == 16
