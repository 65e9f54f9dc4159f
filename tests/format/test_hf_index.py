from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from milepost.errors import FormatError, InvalidInputError, UnencodableError
from milepost.format.index import Index, encode_index, parse_index, part_names


def document(**fields: Any) -> bytes:
    whole = {"metadata": {"total_size": 8}, "weight_map": {"w": "model.safetensors"}, **fields}
    return json.dumps({k: v for k, v in whole.items() if v != "absent"}).encode()


def test_an_index_reads_back_with_everything_it_did_not_know() -> None:
    index = Index(
        weight_map={
            "b": "model-00002-of-00002.safetensors",
            "a": "model-00001-of-00002.safetensors",
        },
        total_size=2**40,
        metadata={"total_parameters": 7, "note": {"x": [1.5, None]}},
        other={"version": "1"},
    )
    raw = encode_index(index)
    assert parse_index(raw, "x") == index
    assert encode_index(parse_index(raw, "x")) == raw


@pytest.mark.case("V11")
def test_the_bytes_are_those_that_transformers_writes(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(tmp_path, max_shard_size="8KB")
    raw = (tmp_path / "model.safetensors.index.json").read_bytes()
    index = parse_index(raw, "x")
    assert encode_index(index) == raw
    parts = sorted(name for name in os.listdir(tmp_path) if name.endswith(".safetensors"))
    assert sorted(set(index.weight_map.values())) == parts == part_names("model", len(parts))
    assert len(parts) > 2


def test_metadata_is_written_even_when_there_is_none() -> None:
    raw = encode_index(Index(weight_map={}))
    assert json.loads(raw) == {"metadata": {}, "weight_map": {}}


@pytest.mark.case("V11")
@pytest.mark.parametrize("size", [8, 8.0, 0, 2**62, 1.5e10])
def test_total_size_is_an_integer_even_where_a_float_was_written(size: float) -> None:
    found = parse_index(document(metadata={"total_size": size}), "x").total_size
    assert found == size
    assert type(found) is int


@pytest.mark.parametrize("metadata", ["absent", None, {}, {"total_size": None}])
def test_an_index_may_have_no_total_size(metadata: object) -> None:
    index = parse_index(document(metadata=metadata), "x")
    assert index.total_size is None
    assert index.metadata == {}


@pytest.mark.case("V11")
@pytest.mark.parametrize("size", [-1, 1.5, True, "8", [8], -0.5, 2**63, 1e300])
def test_a_total_size_that_is_no_number_of_bytes_is_refused(size: object) -> None:
    with pytest.raises(FormatError) as refused:
        parse_index(document(metadata={"total_size": size}), "i.json")
    assert str(refused.value) == (
        f"i.json: metadata.total_size: expected a number of bytes, found {size!r}"
    )


UNSAFE = [
    "", ".", "..", "/etc/passwd", "../model.safetensors", "sub/model.safetensors", "a/..",
    "a\0b", "..\\model.safetensors", "C:\\x",
]  # fmt: skip


@pytest.mark.parametrize("part", UNSAFE)
def test_a_part_that_lies_elsewhere_is_refused(part: str) -> None:
    with pytest.raises(FormatError) as read:
        parse_index(document(weight_map={"l.0.w": part}), "i.json")
    assert str(read.value).startswith(f'i.json: weight_map["l.0.w"]: {part!r} is no plain file')
    with pytest.raises(InvalidInputError, match="is no plain file name"):
        encode_index(Index(weight_map={"l.0.w": part}))


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"[]", "x: expected an object, found []"),
        (b"null", "x: expected an object, found None"),
        (b"{}", "x: weight_map is missing"),
        (document(weight_map=["a"]), "x: weight_map: expected an object, found ['a']"),
        (document(weight_map=None), "x: weight_map: expected an object, found None"),
        (document(weight_map={"w": 1}), "x: weight_map.w: expected the name of a part, found 1"),
        (document(weight_map={"w": None}), "x: weight_map.w: expected the name of a part"),
        (document(metadata=[1]), "x: metadata: expected an object, found [1]"),
        (b'{"weight_map": {"w": "a", "w": "b"}}', "x: line 1 column 27: weight_map: the key 'w'"),
        (b'{"weight_map": {}, "weight_map": {}}', "x: line 1 column 20: the key 'weight_map'"),
        (b'{"weight_map": {}, "metadata": {"total_size": NaN}}',
         "x: line 1 column 47: metadata.total_size: NaN is not JSON"),
        (b'{"weight_map": {', "x: line 1 column 17: Expecting property name"),
        (b"\xff", "x: line 1 column 1: byte 0xff is not UTF-8"),
    ],
)  # fmt: skip
def test_an_index_that_cannot_be_right_is_refused_with_its_place(raw: bytes, message: str) -> None:
    with pytest.raises(FormatError) as refused:
        parse_index(raw, "x")
    assert str(refused.value).startswith(message), str(refused.value)


def test_metadata_that_json_cannot_hold_is_not_written() -> None:
    with pytest.raises(UnencodableError, match=r"^metadata\.loss: nan"):
        encode_index(Index(weight_map={}, metadata={"loss": float("nan")}))


@pytest.mark.case("V11")
def test_parts_are_numbered_as_the_hub_does() -> None:
    assert part_names("model", 1) == ["model.safetensors"]
    assert part_names("optimizer", 3) == [
        "optimizer-00001-of-00003.safetensors",
        "optimizer-00002-of-00003.safetensors",
        "optimizer-00003-of-00003.safetensors",
    ]
    assert part_names("model", 100_000)[-1] == "model-100000-of-100000.safetensors"


def test_a_model_has_at_least_one_part() -> None:
    with pytest.raises(InvalidInputError, match="model: a model has at least one part, found"):
        part_names("model", 0)
