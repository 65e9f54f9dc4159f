"""The page docs/spec/v1.md itself: its reader runs, its tables are those of the code."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import milepost as mp
from milepost.format import digests, header, manifest, pickle_tree, strictjson, tree_records
from milepost.format.dtypes import DTYPES
from milepost.format.tree import Reference, decode, encode
from milepost.format.tree_rules import RULES
from milepost.layouts import trio_meta

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "spec" / "v1.md").read_text(encoding="utf-8")
TABLES: list[type[msgspec.Struct]] = [
    manifest.Manifest,
    manifest.FileEntry,
    manifest.ModelEntry,
    manifest.StateEntry,
]


def section(title: str) -> str:
    """The text below a heading, up to the next heading of any level."""
    match = re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^#|\Z)", PAGE, re.DOTALL | re.MULTILINE)
    assert match is not None, f"the page has no heading {title!r}"
    return match[1]


def rows(text: str) -> Iterator[list[str]]:
    """The cells of each row of the tables in `text`, without their heads."""
    body = False
    for line in text.splitlines():
        if not line.startswith("|"):
            body = False
        elif set(line) <= set("|-"):
            body = True
        elif body:
            yield [cell.strip() for cell in line.strip("|").split("|")]


def code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def fields(kind: type[msgspec.Struct]) -> dict[str, bool]:
    """Names of the fields, and whether a document must have them."""
    return {f.name: f.required for f in msgspec.structs.fields(kind)}


@pytest.fixture(scope="module")
def reader() -> Any:
    """`read_weight` of the page, made from the very block that stands there."""
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len([line for line in block.splitlines() if line.strip()]) <= 15
    names: dict[str, Any] = {}
    exec(compile(block, "docs/spec/v1.md", "exec"), names)  # noqa: S102
    return names["read_weight"]


@pytest.mark.spec("v1#weights-4", "v1#index-2")
def test_the_reader_of_the_page_reads_weights_and_their_tied_names(
    reader: Any, saved: Path, state: dict[str, Any]
) -> None:
    for name, tensor in state["model"].state_dict().items():
        dtype, shape, data = reader(saved, name)
        assert (dtype, shape) == ("F32" if tensor.is_floating_point() else "I64", [*tensor.shape])
        assert data == tensor.numpy().tobytes()


def test_the_reader_of_the_page_reads_what_is_in_several_parts(reader: Any, save: Any) -> None:
    path = save(4, max_shard_size=64)
    assert len(list(path.glob("model-*.safetensors"))) > 2
    _, shape, data = reader(path, "norm.weight")
    expected = mp.Checkpoint.open(path).read("norm.weight").numpy()
    assert np.array_equal(np.frombuffer(data, "<f4").reshape(shape), expected)


def test_the_reader_of_the_page_refuses_a_changed_manifest(reader: Any, saved: Path) -> None:
    place = saved / "milepost.json"
    place.write_bytes(place.read_bytes().replace(b'"step": 3', b'"step": 4'))
    with pytest.raises(AssertionError, match="the manifest was changed"):
        reader(saved, "norm.weight")


def test_the_tables_of_the_manifest_have_every_key() -> None:
    expected = {name: need for kind in TABLES for name, need in fields(kind).items()}
    expected |= {"format": True, "format_version": True, "self_digest": True}
    cells = [row for row in rows(section("The manifest")) if len(row) == 4]
    assert {code(row[0])[0]: row[2] == "yes" for row in cells} == expected


def test_the_table_of_the_typed_tree_has_every_tag() -> None:
    found = {tag for row in rows(section("The typed tree")) for tag in code(row[0])}
    others = {"enum", "namedtuple", "numpy.ndarray", "numpy.scalar", "numpy.dtype"}
    ours = {f"torch.{word}" for word in ("tensor", "parameter", "Size", "device", "version")}
    ours |= {f"torch.{word}" for word in ("dtype", "layout", "memory_format")}
    assert found == set(RULES) | others | ours


@pytest.mark.parametrize("row", list(rows(section("The typed tree"))), ids=lambda row: row[0])
def test_an_example_of_the_typed_tree_reads_and_writes_as_it_stands(row: list[str]) -> None:
    example = json.loads(code(row[-1])[0])
    value = decode(example, None, where="v1.md")
    if isinstance(value, Reference):
        assert {"$type": value.tag, **value.fields} == example
        return
    assert encode(value) == example


@pytest.mark.parametrize("row", list(rows(section("The typed tree"))), ids=lambda row: row[0])
def test_the_fields_of_a_tag_are_those_of_the_code(row: list[str]) -> None:
    for tag in code(row[0]):
        if tag in RULES:
            assert set(RULES[tag].fields) <= set(code(row[1])), tag


def test_the_limits_are_those_of_the_code() -> None:
    found = {row[0]: row[1] for row in rows(section("Hostile input"))}
    numbers: Mapping[str, int] = {
        "header of a safetensors file": header.MAX_HEADER_NBYTES,
        "dims of a tensor": header.MAX_DIMS,
        "manifest, `meta.json`": manifest.MAX_MANIFEST_NBYTES,
        "levels of JSON": strictjson.MAX_DEPTH,
        "bits of an integer in JSON": strictjson.MAX_INTEGER_NBITS,
        "containers inside each other in a typed tree": tree_records.MAX_DEPTH,
        "bytes of an extent": digests.EXTENT_NBYTES,
        "levels of a tree in a `.pt`": pickle_tree.MAX_DEPTH,
    }
    assert trio_meta.MAX_META_NBYTES == manifest.MAX_MANIFEST_NBYTES
    for what, limit in numbers.items():
        assert found[what].split(" ")[0] == f"{limit:,}", what
    assert len(found) == len(numbers) + 1


def test_the_element_types_are_those_of_the_code() -> None:
    paragraph = PAGE[PAGE.index("Element types are") : PAGE.index("`F4` is packed")]
    assert code(paragraph) == list(DTYPES)


def test_every_rule_is_shown_by_a_test() -> None:
    script = ROOT / "tools" / "spec_coverage.py"
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
