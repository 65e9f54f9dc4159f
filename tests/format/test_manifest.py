"""The manifest: nothing changed in it goes unseen, versions are told apart, names stay inside."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from milepost.errors import (
    CheckpointError,
    DigestMismatchError,
    FormatError,
    UnencodableError,
    UnsupportedVersionError,
)
from milepost.format import selfdigest, strictjson
from milepost.format.manifest import (
    FORMAT_VERSION,
    MIGRATIONS,
    FileEntry,
    Manifest,
    ModelEntry,
    StateEntry,
    encode_manifest,
    migrate,
    parse_manifest,
    unknown_keys,
)

GOLDEN = Path(__file__).parents[1] / "golden"


def manifest(**changes: Any) -> Manifest:
    values: dict[str, Any] = {
        "checkpoint_id": "0" * 32,
        "step": 10,
        "epoch": 0.5,
        "created": "2026-01-02T03:04:05.678Z",
        "metrics": {"loss": 0.25, "tokens": 7, "ppl": "inf", "none": None},
        "files": [
            FileEntry(name="model.safetensors", nbytes=8, role="weights", digest="a" * 32),
            FileEntry(
                name="training/optimizer.safetensors",
                nbytes=99,
                role="state",
                digest="b" * 32,
                records=(0, 2),
            ),
        ],
        "models": {
            "model": ModelEntry(prefix="", stem="model", huggingface=True, tied={"a": "b"}),
            "ema": ModelEntry(prefix="ema", stem="model", huggingface=False),
        },
        "state": {"optimizer": StateEntry(kind="optimizer", stem="optimizer", class_name="AdamW")},
        **changes,
    }
    return Manifest(**values)


def sealed(change: Callable[[dict[str, Any]], object]) -> bytes:
    """A manifest that was changed before it was sealed."""
    document = msgspec.to_builtins(manifest())
    change(document)
    return selfdigest.seal(document)


def test_a_manifest_reads_back_as_it_was_written() -> None:
    assert parse_manifest(encode_manifest(manifest()), "m") == manifest()
    assert parse_manifest(encode_manifest(manifest()), "m").nbytes == 107


@pytest.mark.case("C1.1")
def test_every_flipped_byte_is_found() -> None:
    raw = encode_manifest(manifest())
    for at in range(len(raw)):
        for bit in (0x01, 0x20, 0x80):
            damaged = bytearray(raw)
            damaged[at] ^= bit
            with pytest.raises(CheckpointError):
                parse_manifest(bytes(damaged), "m")


def test_every_cut_and_every_appended_byte_is_found() -> None:
    raw = encode_manifest(manifest())
    for end in range(len(raw)):
        with pytest.raises(CheckpointError):
            parse_manifest(raw[:end], "m")
    for tail in (b" ", b"\n", b"}", b"\0"):
        with pytest.raises(CheckpointError):
            parse_manifest(raw + tail, "m")


def test_a_value_edited_by_hand_is_found_and_told_from_a_malformed_document() -> None:
    raw = encode_manifest(manifest())
    with pytest.raises(DigestMismatchError, match=r"m: self_digest: recorded"):
        parse_manifest(raw.replace(b'"step": 10', b'"step": 20'), "m")


@pytest.mark.case("C1.8")
@pytest.mark.parametrize("version", ["2.0", "10.3", "0.9"])
def test_another_major_version_is_refused_by_name(version: str) -> None:
    raw = sealed(lambda document: document.update(format_version=version))
    with pytest.raises(
        UnsupportedVersionError, match=rf"version {version}, this Milepost reads 1.x"
    ):
        parse_manifest(raw, "m")


@pytest.mark.parametrize("version", ["1", "1.", "", "one", "1.0.0", "-1.0", 1.0, None, ["1.0"]])
def test_a_version_that_is_none_is_malformed(version: Any) -> None:
    raw = sealed(lambda document: document.update(format_version=version))
    with pytest.raises(FormatError, match=r"expected text such as '1\.0'"):
        parse_manifest(raw, "m")


def test_a_newer_minor_version_is_read_and_its_keys_are_kept() -> None:
    def newer(document: dict[str, Any]) -> None:
        document.update(format_version="1.7", colour={"of": ["the", "sky"]}, files=[])

    raw = sealed(newer)
    parsed = parse_manifest(raw, "m")
    assert parsed.format_version == "1.7"
    unknown = unknown_keys(raw, "m")
    assert unknown == {"colour": {"of": ["the", "sky"]}}
    again = encode_manifest(parsed, unknown)
    assert unknown_keys(again, "m") == unknown
    assert parse_manifest(again, "m") == parsed


def test_a_requirement_that_is_unknown_is_refused_by_name() -> None:
    raw = sealed(lambda document: document.update(requires=["holograms", "antigravity"]))
    with pytest.raises(UnsupportedVersionError, match=r"needs antigravity, holograms, which"):
        parse_manifest(raw, "m")


@pytest.mark.parametrize("requires", ["holograms", [["holograms"]], [None], {"a": 1}, None])
def test_requirements_that_are_no_list_of_texts_are_malformed(requires: Any) -> None:
    raw = sealed(lambda document: document.update(requires=requires))
    with pytest.raises(FormatError, match=r"requires"):
        parse_manifest(raw, "m")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(format="zarr"), "format is 'zarr', expected 'milepost'"),
        (lambda d: d.update(step="10"), r"\$\.step"),
        (lambda d: d.update(step=-1), r"\$\.step"),
        (lambda d: d.pop("checkpoint_id"), "checkpoint_id"),
        (lambda d: d["files"][0].update(nbytes=-1), r"\$\.files\[0\]\.nbytes"),
        (lambda d: d["files"][0].update(role="king"), r"\$\.files\[0\]\.role"),
        (lambda d: d["files"][1].update(records=[0]), r"\$\.files\[1\]\.records"),
        (lambda d: d["files"][1].update(records=[-1, 2]), r"\$\.files\[1\]\.records"),
        (lambda d: d["metrics"].update(loss=True), r"\$\.metrics"),
        (lambda d: d["files"].append(d["files"][0]), "listed twice"),
    ],
)
def test_a_wrong_value_is_refused_by_its_place(
    change: Callable[[dict[str, Any]], object], message: str
) -> None:
    with pytest.raises(FormatError, match=message):
        parse_manifest(sealed(change), "m")


@pytest.mark.parametrize(
    "raw", [b"", b"[]", b"null", b"{}", b"\xff\xfe", b'{"format": "milepost"}']
)
def test_what_is_no_manifest_is_malformed(raw: bytes) -> None:
    with pytest.raises(FormatError, match=r"^m: "):
        parse_manifest(raw, "m")


@pytest.mark.parametrize(
    "name", ["", "/etc/passwd", "../x", "a/../b", "a//b", "a/.", "a\\b", "a\0b"]
)
@pytest.mark.parametrize("place", ["file", "prefix", "model stem", "state stem"])
def test_no_name_leads_out_of_the_checkpoint(place: str, name: str) -> None:
    def change(document: dict[str, Any]) -> None:
        match place:
            case "file":
                document["files"][0]["name"] = name
            case "prefix":
                document["models"]["ema"]["prefix"] = name or ".."
            case "model stem":
                document["models"]["model"]["stem"] = name
            case _:
                document["state"]["optimizer"]["stem"] = name

    with pytest.raises(FormatError, match=r"is not a plain"):
        parse_manifest(sealed(change), "m")


def test_a_stem_is_a_name_and_not_a_path() -> None:
    raw = sealed(lambda d: d["models"]["model"].update(stem="elsewhere/model"))
    with pytest.raises(FormatError, match=r"the stem 'elsewhere/model' is not a plain name"):
        parse_manifest(raw, "m")


@pytest.mark.case("C3.15")
def test_a_number_that_json_lacks_is_never_written() -> None:
    with pytest.raises(UnencodableError, match=r"epoch"):
        encode_manifest(manifest(epoch=float("nan")))
    text = encode_manifest(manifest())
    strictjson.loads(text, "m")


# The chain of migrations.


def test_the_chain_leads_from_every_released_version_to_the_one_written_now() -> None:
    assert FORMAT_VERSION in MIGRATIONS
    for version in MIGRATIONS:
        assert migrate({"format_version": version})["format_version"] == FORMAT_VERSION
    assert [version for version, row in MIGRATIONS.items() if row is None] == [FORMAT_VERSION]


def golden_directory(version: str) -> Path:
    return GOLDEN / f"directory_v{version.removesuffix('.0')}"


def test_every_released_version_has_its_golden_directory() -> None:
    for version in MIGRATIONS:
        raw = (golden_directory(version) / "milepost.json").read_bytes()
        assert strictjson.loads(raw, "golden")["format_version"] == version
        assert parse_manifest(raw, "golden").format_version == FORMAT_VERSION


def test_a_document_takes_every_step_of_a_chain_in_order() -> None:
    """With steps made up here: today's chain has one version and none."""

    def first(document: Mapping[str, Any]) -> dict[str, Any]:
        return {**document, "taken": ["first"]}

    def second(document: Mapping[str, Any]) -> dict[str, Any]:
        return {**document, "taken": [*document["taken"], "second"]}

    chain = {"1.0": ("1.1", first), "1.1": ("1.2", second), "1.2": None}
    before = {"format_version": "1.0", "step": 3}
    after = migrate(before, migrations=chain)
    assert after == {"format_version": "1.2", "step": 3, "taken": ["first", "second"]}
    assert before == {"format_version": "1.0", "step": 3}
    newest = {"format_version": "1.9", "step": 3}
    assert migrate(newest, migrations=chain) == newest
