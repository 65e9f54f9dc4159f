"""Random damage to whatever is parsed: refused with an error of Milepost, or read; never anything
else, and never much more memory than the bytes that are there.

`FUZZ_EXAMPLES` says how many inputs each parser gets; `make fuzz` gives it a large number.
"""

from __future__ import annotations

import os
import pickle
import tracemalloc
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import milepost as mp
from milepost.errors import CheckpointError
from milepost.format import strictjson
from milepost.format.header import parse_header
from milepost.format.index import parse_index
from milepost.format.manifest import parse_manifest
from milepost.format.pickles import loads
from milepost.format.tree import decode
from milepost.layouts.dcp_metadata import parse_metadata

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "4000"))
FEW = 60
ROOM = 8 * 2**20
"""Bytes that a parser may take besides a multiple of its input: its tables and messages."""
PER_BYTE = 400

Parse = Callable[[bytes], object]


@dataclass(frozen=True)
class Target:
    """A parser, and inputs that it reads."""

    parse: Parse
    seeds: tuple[bytes, ...]


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(12.0).reshape(3, 4))
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))


VALUES = {
    "tuple": (1, 2.5, None, True, "text \N{SNOWMAN}"),
    "ordered": OrderedDict(b=[1, [2, {"c": {3, 4}}]], a=b"\0\xff"),
    "numbers": [2**70, -1, 1e308, float("inf"), complex(1, -2)],
    "path": Path("a/b"),
}


def _documents(tmp: Path) -> dict[str, tuple[bytes, ...]]:
    """What real saves leave: by kind, the bytes that are parsed."""
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters())
    model.weight.grad, model.scale.grad = torch.ones(3, 4), torch.ones(3, dtype=torch.bfloat16)
    optimizer.step()
    state = {"model": model, "optimizer": optimizer, "values": VALUES}
    path = tmp / "checkpoint-1"
    mp.save(path, state, step=1, metrics={"loss": 0.5}, max_shard_size=40)
    dcp_save({"model": model.state_dict()}, checkpoint_id=tmp / "dcp", no_dist=True)
    pickles = [pickle.dumps(VALUES, protocol=protocol) for protocol in range(6)]
    return {
        "header": tuple(part.read_bytes() for part in sorted(path.rglob("*.safetensors"))),
        "index": tuple(place.read_bytes() for place in path.rglob("*.index.json")),
        "manifest": ((path / "milepost.json").read_bytes(),),
        "tree": tuple(place.read_bytes() for place in (path / "training").glob("*.json")),
        "pickle": tuple(pickles),
        "dcp": ((tmp / "dcp" / ".metadata").read_bytes(),),
    }


def _header(raw: bytes) -> object:
    return parse_header(raw, file_nbytes=len(raw), where="m.safetensors")


def _tree(raw: bytes) -> object:
    return decode(strictjson.loads(raw, "state.json"), None, where="state.json")


PARSERS: dict[str, Parse] = {
    "header": _header,
    "index": lambda raw: parse_index(raw, "index.json"),
    "manifest": lambda raw: parse_manifest(raw, "milepost.json"),
    "tree": _tree,
    "pickle": lambda raw: loads(raw, where="extra_state.pt"),
    "dcp": lambda raw: parse_metadata(raw, ".metadata"),
}


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Target]:
    found = _documents(tmp_path_factory.mktemp("seeds"))
    assert found.keys() == PARSERS.keys() and all(found.values())
    return {name: Target(PARSERS[name], seeds) for name, seeds in found.items()}


# ---- damage

TOKENS = (
    b"{", b"}", b"[", b"]", b'"', b",", b":", b"null", b"NaN", b"1e999", b"-1", b"0", b"../", b"/",
    b"\\u0000", b"\\ud800", b"18446744073709551616", b"9223372036854775807", b'"$type"',
    b'"tuple"', b'{"$type":"tensor"}', b"data_offsets", b"[[[[[[[[", b"\x80\x04",
    b"c__builtin__\neval\n", b"cos\nsystem\n", b"R", b".", b"(", b"t", b"b", b"2", b"\x93",
    b"\x8d\xff\xff\xff\xff\xff\xff\xff\x7f", b"B\xff\xff\xff\x7f", b"q\x00", b"h\x00",
    b"j\xff\xff\xff\xff", b"\x95\xff\xff\xff\xff\xff\xff\xff\xff",
)  # fmt: skip
PLACE = st.floats(0, 1, exclude_max=True)
CHANGE = st.one_of(
    st.tuples(st.just("flip"), PLACE, st.integers(0, 7)),
    st.tuples(st.just("set"), PLACE, st.binary(min_size=1, max_size=8)),
    st.tuples(st.just("insert"), PLACE, st.sampled_from(TOKENS)),
    st.tuples(st.just("replace"), PLACE, st.sampled_from(TOKENS)),
    st.tuples(st.just("delete"), PLACE, st.integers(1, 64)),
    st.tuples(st.just("repeat"), PLACE, st.integers(1, 200)),
    st.tuples(st.just("cut"), PLACE, st.just(0)),
    st.tuples(st.just("move"), PLACE, PLACE),
)


def damaged(raw: bytes, changes: list[tuple[str, float, Any]]) -> bytes:
    data = bytearray(raw)
    for kind, place, more in changes:
        at = int(place * len(data))
        if kind == "flip" and data:
            data[at] ^= 1 << more
        elif kind == "set":
            data[at : at + len(more)] = more
        elif kind == "insert":
            data[at:at] = more
        elif kind == "replace":
            data[at : at + len(more)] = more
        elif kind == "delete":
            del data[at : at + more]
        elif kind == "repeat":
            data[at:at] = data[at : at + 8] * more
        elif kind == "cut":
            del data[at:]
        elif kind == "move":
            to = int(more * len(data))
            data[to:to] = data[at : at + 32]
    return bytes(data)


def judge(parse: Parse, raw: bytes) -> None:
    """Read, or refused by an error of Milepost; with memory in proportion to the input."""
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    try:
        parse(raw)
    except CheckpointError as error:
        assert str(error), "an error says something"
    taken = tracemalloc.get_traced_memory()[1] - before
    assert taken <= ROOM + PER_BYTE * len(raw), f"{taken} bytes for {len(raw)}"


def fuzz(target: Target, count: int) -> None:
    @settings(
        max_examples=count,
        derandomize=count <= FEW,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(st.sampled_from(target.seeds), st.lists(CHANGE, min_size=1, max_size=6))
    def try_one(seed: bytes, changes: list[tuple[str, float, Any]]) -> None:
        judge(target.parse, damaged(seed, changes))

    for seed in target.seeds:
        target.parse(seed)
    tracemalloc.start()
    try:
        try_one()
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", PARSERS)
def test_damage_is_refused_or_read_and_nothing_else(name: str, targets: dict[str, Target]) -> None:
    fuzz(targets[name], FEW)


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", PARSERS)
def test_a_great_deal_of_damage_is_too(name: str, targets: dict[str, Target]) -> None:
    fuzz(targets[name], EXAMPLES)


@pytest.mark.parametrize("name", PARSERS)
def test_random_bytes_are_refused_or_read_too(name: str, targets: dict[str, Target]) -> None:
    for seed in range(50):
        raw = torch.randint(
            0, 256, (seed * 7,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8
        )
        tracemalloc.start()
        try:
            judge(targets[name].parse, bytes(raw.tolist()))
        finally:
            tracemalloc.stop()
