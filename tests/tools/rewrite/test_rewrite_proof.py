"""Damage in headers and indices of an input is found by every verb, before anything is written."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import milepost as mp
from milepost.engine.write import Durability, WriteOptions
from milepost.errors import DamagedError, DigestMismatchError
from milepost.format.digests import digest_of
from milepost.format.header import read_header
from milepost.format.manifest import encode_manifest
from milepost.layouts.directory import DirectoryCheckpoint
from milepost.tools.cast import cast
from milepost.tools.export import ExportTarget, export_checkpoint
from milepost.tools.rename import rename
from milepost.tools.reshard import reshard
from milepost.tools.rewrite.options import Mode, RewriteOptions
from milepost.tools.rewrite.source import open_source
from tests.tools.rewrite.hub import QUICK, content

Verb = Callable[[Path, Path], Any]
VERBS: dict[str, Verb] = {
    "export": lambda source, out: export_checkpoint(source, out),
    "cast": lambda source, out: cast(source, out, dtype="bfloat16", options=QUICK),
    "reshard": lambda source, out: reshard(source, out, options=QUICK),
    "rename": lambda source, out: rename(source, out, rules=[("^", "x.")], options=QUICK),
    "a dry run": lambda source, out: reshard(
        source, out, options=RewriteOptions(is_durable=False, mode=Mode.DRY_RUN)
    ),
}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint with two tensors of one shape."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
    options = WriteOptions(durability=Durability.PAGE_CACHE, threads=1)
    mp.save(tmp_path / "checkpoint-7", {"model": model}, step=7, options=options)
    return tmp_path / "checkpoint-7"


def change_header(path: Path, old: bytes, new: bytes) -> None:
    """Swap `old` and `new`, which have one length, in the header of a part."""
    raw = path.read_bytes()
    end = 8 + struct.unpack("<Q", raw[:8])[0]
    header, data = raw[8:end], raw[end:]
    assert old in header and len(old) == len(new)
    swapped = header.replace(old, b"\0" * len(old)).replace(new, old)
    path.write_bytes(raw[:8] + swapped.replace(b"\0" * len(old), new) + data)


def refuses(verb: Verb, source: Path, match: str) -> None:
    before = content(source.parent)
    with pytest.raises(DamagedError, match=match) as caught:
        verb(source, source.parent / "out")
    assert "use another checkpoint" in str(caught.value)
    assert content(source.parent) == before


@pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS)
@pytest.mark.parametrize("old, new", [(b'"0.weight"', b'"1.weight"'), (b'"F32"', b'"I32"')])
def test_a_header_that_says_other_names_or_types_is_refused(
    saved: Path, verb: Verb, old: bytes, new: bytes
) -> None:
    part = saved / "model.safetensors"
    change_header(part, old, new)
    refuses(verb, saved, r"model\.safetensors: the header: bytes 0 to \d+ are not those")


@pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS)
def test_an_index_that_was_changed_is_refused(saved: Path, verb: Verb) -> None:
    place = saved / "model.safetensors.index.json"
    index = json.loads(place.read_bytes())
    raw = place.read_bytes().replace(b"total_size", b"total_sizf")
    assert index != json.loads(raw)
    place.write_bytes(raw)
    refuses(verb, saved, r"model\.safetensors\.index\.json.*are not\s+those that were saved")


@pytest.mark.parametrize("to", [ExportTarget.TRIO, ExportTarget.SINGLE_FILE])
def test_an_index_that_was_changed_is_refused_by_exports_to_files(
    saved: Path, tmp_path: Path, to: ExportTarget
) -> None:
    place = saved / "model.safetensors.index.json"
    place.write_bytes(place.read_bytes() + b"\n")
    refuses(lambda source, _: export_checkpoint(source, tmp_path / "x.pt", to=to), saved, "index")


@pytest.mark.parametrize("verb", ["export", "cast"])
def test_a_part_with_one_digest_is_compared_whole(saved: Path, verb: str) -> None:
    checkpoint = DirectoryCheckpoint(saved)
    part = saved / "model.safetensors"
    checkpoint.manifest.files = [
        entry
        if entry.name != part.name
        else type(entry)(
            name=entry.name,
            nbytes=entry.nbytes,
            role=entry.role,
            digest=digest_of(part.read_bytes()),
        )
        for entry in checkpoint.manifest.files
    ]
    (saved / "milepost.json").write_bytes(encode_manifest(checkpoint.manifest))
    VERBS[verb](saved, saved.parent / "whole")
    raw = bytearray(part.read_bytes())
    raw[-1] ^= 1
    part.write_bytes(raw)
    with pytest.raises(DamagedError, match=r"model\.safetensors.*are not\s+those"):
        VERBS[verb](saved, saved.parent / "out")
    assert not (saved.parent / "out").exists()


def test_a_part_that_was_not_saved_is_refused(saved: Path) -> None:
    checkpoint = DirectoryCheckpoint(saved)
    checkpoint.manifest.files = [
        entry for entry in checkpoint.manifest.files if entry.name != "model.safetensors"
    ]
    (saved / "milepost.json").write_bytes(encode_manifest(checkpoint.manifest))
    refuses(VERBS["reshard"], saved, r"model\.safetensors: was not part of this save")


def test_rows_are_not_read_of_a_tensor_whose_other_rows_are_damaged(saved: Path) -> None:
    part = saved / "model.safetensors"
    with open_source(saved) as source:
        whole = source["0.weight"].read()
        assert torch.equal(source["0.weight"].read((2, 5)), whole[2:5])
        header = read_header(part)
        place = header.data_start + header.tensors["0.weight"].end - 1
    raw = bytearray(part.read_bytes())
    raw[place] ^= 1
    part.write_bytes(raw)
    with open_source(saved) as source, ThreadPoolExecutor(4) as pool:
        reads = [pool.submit(source["0.weight"].read, (row, row + 1)) for row in range(8)]
        assert {type(read.exception()) for read in reads} == {DigestMismatchError}
        assert "0.weight: bytes" in str(reads[0].exception())
        assert source["1.weight"].read((0, 1)).shape == (1, 16)


@pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS)
def test_a_sidecar_that_the_weights_need_is_refused_when_it_is_damaged(
    verb: Verb, tmp_path: Path
) -> None:
    biases = {"router_balancing_biases.pt": {"model.layers.0.mlp.gate": torch.ones(4)}}
    model = torch.nn.Linear(4, 4)
    source = tmp_path / "checkpoint-1"
    mp.save(source, {"model": model}, step=1, sidecars=biases)
    place = source / "router_balancing_biases.pt"
    raw = bytearray(place.read_bytes())
    raw[len(raw) // 2] ^= 1
    place.write_bytes(raw)
    refuses(verb, source, r"router_balancing_biases\.pt: .*bytes .*are not those")
