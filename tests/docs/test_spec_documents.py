"""Rules of docs/spec/v1.md about documents, headers and digests, each shown by a small case."""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import pytest
import xxhash

import milepost as mp
from milepost.errors import (
    DamagedError,
    DigestMismatchError,
    FormatError,
    InvalidInputError,
    UnencodableError,
    UnsupportedVersionError,
)
from milepost.format import digests, manifest, selfdigest, strictjson
from milepost.format.header import read_header

Edit: TypeAlias = Callable[[Path, Callable[[dict[str, Any]], None]], None]

LOOSE = [
    b"\xef\xbb\xbf{}",
    b'{"a": NaN}',
    b'{"a": Infinity}',
    b'{"a": 1e999}',
    b'{"a": 1, "a": 2}',
    b'{"a": "\\ud800"}',
    b'{"a": "\xff"}',
    b"[" * 257 + b"]" * 257,
    b'{"a": ' + b"9" * 5000 + b"}",
]


def manifest_of(checkpoint: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((checkpoint / "milepost.json").read_bytes())
    return document


def entry_of(checkpoint: Path, name: str) -> dict[str, Any]:
    (entry,) = [entry for entry in manifest_of(checkpoint)["files"] if entry["name"] == name]
    return dict(entry)


def records_of(checkpoint: Path, entry: dict[str, Any]) -> list[tuple[bytes, int, int]]:
    first, count = entry["records"]
    raw = (checkpoint / "training/digests.bin").read_bytes()[first * 32 : (first + count) * 32]
    assert xxhash.xxh3_128_hexdigest(raw) == entry["digest"]
    return list(struct.iter_unpack("<16sQQ", raw))


# ---- JSON, digests, seals


@pytest.mark.spec("v1#json-1")
@pytest.mark.parametrize("value", [float("nan"), float("inf"), "\ud800", 2**14000, {1: 2}])
def test_what_strict_json_cannot_hold_is_not_written(value: object) -> None:
    with pytest.raises(UnencodableError):
        strictjson.dumps({"a": value})


@pytest.mark.spec("v1#json-2", "v1#limit-2")
@pytest.mark.parametrize("raw", LOOSE, ids=range(len(LOOSE)))
def test_loose_json_is_refused_wherever_it_stands(raw: bytes, saved: Path) -> None:
    for name in ("milepost.json", "model.safetensors.index.json", "training/state.json"):
        before = (saved / name).read_bytes()
        (saved / name).write_bytes(raw)
        with pytest.raises(FormatError, match=re.escape(str(saved / name))):
            checkpoint = mp.Checkpoint.open(saved)
            checkpoint.read_weights()
            checkpoint.training_state()
        (saved / name).write_bytes(before)


@pytest.mark.spec("v1#digest-1")
def test_digests_are_those_of_xxh3_with_seed_0(saved: Path) -> None:
    assert digests.digest_of(b"") == "99aa06d3014798d86001c324468d497f"
    entry = entry_of(saved, "training/state.json")
    data = (saved / "training/state.json").read_bytes()
    assert entry["digest"] == xxhash.xxh3_128(data, seed=0).digest().hex()


@pytest.mark.spec("v1#seal-1", "v1#seal-2")
def test_a_sealed_document_fits_its_own_digest(saved: Path, trio: Path) -> None:
    for path in (saved / "milepost.json", trio.with_name("latest.meta.json")):
        raw = path.read_bytes()
        (match,) = re.finditer(rb'\n  "self_digest": "([0-9a-f]{32})"', raw)
        zeroed = raw[: match.start(1)] + b"0" * 32 + raw[match.end(1) :]
        assert xxhash.xxh3_128_hexdigest(zeroed).encode() == match[1]
        assert raw.endswith(b"\n")


@pytest.mark.spec("v1#seal-3")
@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"step": 3', b'"step": 4'),
        (b'\n  "self_digest"', b'\n   "self_digest"'),
        (b'\n  "self_digest": "', b'\n  "self_digest": "0'),
        (b'"requires": []', b'"requires":  []'),
    ],
)
def test_a_document_changed_in_any_way_is_refused(saved: Path, old: bytes, new: bytes) -> None:
    place = saved / "milepost.json"
    raw = place.read_bytes()
    assert raw.count(old) == 1
    place.write_bytes(raw.replace(old, new))
    with pytest.raises(DamagedError):
        mp.Checkpoint.open(saved)


@pytest.mark.spec("v1#seal-3")
def test_a_second_place_for_the_digest_is_refused() -> None:
    raw = selfdigest.seal({"a": 1})
    doubled = raw.replace(b'\n  "a"', b'\n  "self_digest": "' + b"0" * 32 + b'",\n  "a"')
    with pytest.raises(DigestMismatchError, match="stands 2 times"):
        selfdigest.check(doubled, json.loads(raw), "milepost.json")


# ---- manifest


@pytest.mark.spec("v1#manifest-1")
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("format", "other"),
        ("step", None),
        ("step", "3"),
        ("step", -1),
        ("generation", 2**63),
        ("files", {}),
        ("created", 1),
    ],
)
def test_a_manifest_that_is_none_is_refused(
    saved: Path, edit: Edit, key: str, value: object
) -> None:
    edit(saved / "milepost.json", lambda m: m.update({key: value}))
    with pytest.raises(FormatError):
        mp.Checkpoint.open(saved)


@pytest.mark.spec("v1#manifest-1")
@pytest.mark.parametrize("key", ["format", "format_version", "checkpoint_id", "step", "created"])
def test_a_manifest_without_a_required_key_is_refused(saved: Path, edit: Edit, key: str) -> None:
    edit(saved / "milepost.json", lambda m: m.pop(key))
    with pytest.raises(FormatError):
        mp.Checkpoint.open(saved)


@pytest.mark.spec("v1#manifest-1", "v1#limit-1", "v1#limit-2")
def test_a_manifest_of_more_than_64_mib_is_not_even_read(saved: Path) -> None:
    os.truncate(saved / "milepost.json", 2**26 + 1)
    with pytest.raises(FormatError, match="67108865 bytes, a manifest has at most 67108864"):
        mp.Checkpoint.open(saved)


@pytest.mark.spec("v1#manifest-2")
def test_a_manifest_is_written_with_all_its_keys(saved: Path) -> None:
    known = {field.name for field in msgspec.structs.fields(manifest.Manifest)}
    assert set(manifest_of(saved)) == known | {"self_digest"}


@pytest.mark.spec("v1#manifest-3", "v1#limit-4")
@pytest.mark.parametrize("name", ["", "/etc/passwd", "../x", "a/../b", "a//b", ".", "a\\b", "a\0"])
def test_a_file_name_that_leads_elsewhere_is_refused(saved: Path, edit: Edit, name: str) -> None:
    edit(saved / "milepost.json", lambda m: m["files"][0].update(name=name))
    with pytest.raises(FormatError, match="is not a plain relative path"):
        mp.Checkpoint.open(saved)


@pytest.mark.spec("v1#manifest-3")
@pytest.mark.parametrize(
    ("entry", "change"),
    [
        (("models", "model"), {"prefix": "../../elsewhere"}),
        (("models", "model"), {"prefix": "/etc"}),
        (("models", "model"), {"stem": "../x"}),
        (("models", "model"), {"stem": "a/b"}),
        (("state", "optimizer"), {"stem": "../../x"}),
    ],
)
def test_a_prefix_or_stem_that_leads_elsewhere_is_refused(
    saved: Path, edit: Edit, entry: tuple[str, str], change: dict[str, str]
) -> None:
    table, key = entry
    edit(saved / "milepost.json", lambda m: m[table][key].update(change))
    with pytest.raises(FormatError, match="refusing it"):
        mp.Checkpoint.open(saved)


@pytest.mark.spec("v1#manifest-3")
def test_a_file_that_is_listed_twice_is_refused(saved: Path, edit: Edit) -> None:
    edit(saved / "milepost.json", lambda m: m["files"].append(m["files"][0]))
    with pytest.raises(FormatError, match="is listed twice"):
        mp.Checkpoint.open(saved)


@pytest.mark.spec("v1#manifest-4", "v1#version-1", "v1#version-3")
def test_keys_of_a_later_minor_version_are_read_over_and_kept(saved: Path, edit: Edit) -> None:
    place = saved / "milepost.json"
    edit(place, lambda m: m.update(format_version="1.7", colours={"sky": "blue"}))
    raw = place.read_bytes()
    parsed = manifest.parse_manifest(raw, str(place))
    unknown = manifest.unknown_keys(raw, str(place))
    again = json.loads(manifest.encode_manifest(parsed, unknown))
    assert again["colours"] == {"sky": "blue"}
    assert again["format_version"] == "1.7"


@pytest.mark.spec("v1#manifest-5")
def test_one_model_lies_at_the_root_and_another_under_its_key(
    run: Path, state: dict[str, Any]
) -> None:
    import torch

    path = mp.save(run / "checkpoint-1", {**state, "ema": torch.nn.Linear(2, 2)}, step=1).path
    models = manifest_of(path)["models"]
    assert {key: entry["prefix"] for key, entry in models.items()} == {"model": "", "ema": "ema"}
    assert (path / "ema/model.safetensors").is_file()


@pytest.mark.spec("v1#manifest-6")
@pytest.mark.parametrize("key", ["training", "state", "rng", "resume_adapter", "a/b", "1", "a.b"])
def test_a_key_that_cannot_name_a_file_is_refused(
    run: Path, state: dict[str, Any], key: str
) -> None:
    with pytest.raises(InvalidInputError, match="cannot be used"):
        mp.save(run / "checkpoint-1", {**state, key: 1}, step=1)


# ---- versions


@pytest.mark.spec("v1#version-1", "v1#state-1")
@pytest.mark.parametrize("name", ["milepost.json", "training/state.json"])
def test_a_newer_major_version_is_refused_by_name(saved: Path, edit: Edit, name: str) -> None:
    edit(saved / name, lambda document: document.update(format_version="2.0"))
    with pytest.raises(UnsupportedVersionError, match=r"format version 2\.0"):
        mp.Checkpoint.open(saved).training_state()


@pytest.mark.spec("v1#version-2")
def test_a_requirement_that_is_not_known_is_refused_by_name(saved: Path, edit: Edit) -> None:
    edit(saved / "milepost.json", lambda m: m.update(requires=["sealed-in-wax"]))
    with pytest.raises(UnsupportedVersionError, match="needs sealed-in-wax"):
        mp.Checkpoint.open(saved)


@pytest.mark.spec("v1#state-1")
def test_a_state_of_another_format_is_refused(saved: Path, edit: Edit) -> None:
    edit(saved / "training/state.json", lambda document: document.update(format="other"))
    with pytest.raises(FormatError, match="not a training state of milepost"):
        mp.Checkpoint.open(saved).training_state()


# ---- digests of files


@pytest.mark.spec("v1#extent-1", "v1#extent-2", "v1#extent-3")
def test_extents_cover_a_part_and_end_where_its_tensors_end(saved: Path) -> None:
    data = (saved / "model.safetensors").read_bytes()
    header = read_header(saved / "model.safetensors")
    borders = {header.data_start + tensor.end for tensor in header.tensors.values()}
    covered = 0
    for digest, start, nbytes in records_of(saved, entry_of(saved, "model.safetensors")):
        assert start == covered
        assert digest == xxhash.xxh3_128_digest(data[start : start + nbytes])
        covered += nbytes
        borders.discard(covered)
    assert covered == len(data)
    assert borders == set()


@pytest.mark.spec("v1#extent-2", "v1#limit-2")
def test_an_extent_has_at_most_64_mib() -> None:
    assert digests.cut_extents([0, 2**26 + 1]) == [(0, 2**26), (2**26, 2**26 + 1)]
    with pytest.raises(FormatError, match="at most 67108864"):
        digests.unpack_records(struct.pack("<16sQQ", bytes(16), 0, 2**26 + 1), "digests.bin")


@pytest.mark.spec("v1#extent-3", "v1#extent-4")
def test_a_file_of_one_extent_has_its_digest_in_the_manifest(saved: Path) -> None:
    for name in ("training/state.json", "training/digests.bin", "model.safetensors.index.json"):
        entry = entry_of(saved, name)
        assert entry["records"] is None
        assert entry["digest"] == digests.digest_of((saved / name).read_bytes())


@pytest.mark.spec("v1#extent-5")
def test_records_that_were_changed_are_not_believed(saved: Path) -> None:
    place = saved / "training/digests.bin"
    raw = bytearray(place.read_bytes())
    raw[0] ^= 1
    place.write_bytes(raw)
    messages = [problem.message for problem in mp.Checkpoint.open(saved).verify().problems]
    assert "training/digests.bin: the digests of model.safetensors were changed" in messages
