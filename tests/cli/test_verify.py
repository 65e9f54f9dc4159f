"""`milepost verify`: damage is found, and traced to its tensor or file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from milepost.layouts.trio import TrioContent, write_trio
from tests.cli.conftest import Make, Milepost


def flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(bytes(raw))


def foreign(path: Path) -> Path:
    """A Hugging Face directory of four parts and an index."""
    path.mkdir()
    weight_map = {}
    for number in range(1, 5):
        part = f"model-{number:05}-of-00004.safetensors"
        save_file({f"layer.{number}": torch.full((4,), float(number))}, path / part)
        weight_map[f"layer.{number}"] = part
    index = {"metadata": {"total_size": 64}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def problems(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [problem for row in document["checkpoints"] for problem in row["problems"]]


def test_a_whole_run_is_verified_and_named_ok(
    make: Make, milepost: Milepost, tmp_path: Path
) -> None:
    make(1)
    make(10)
    write_trio(tmp_path / "run", ["best"], TrioContent(model_state={"w": torch.ones(3)}))
    result = milepost("verify", tmp_path / "run", "--threads", "2")
    assert result.code == 0
    assert [line.split()[0] for line in result.out.splitlines()[:-1]] == ["ok"] * 3
    assert result.out.splitlines()[-1] == "3 checked, 0 with problems"
    found = milepost("verify", tmp_path / "run", "--json").json()
    assert [Path(row["path"]).name for row in found["checkpoints"]] == [
        "checkpoint-1",
        "checkpoint-10",
        "best",
    ]
    assert all(row["has_digests"] for row in found["checkpoints"])


@pytest.mark.case("V17")
def test_a_flipped_byte_in_any_file_is_found_and_traced(make: Make, milepost: Milepost) -> None:
    path = make(1)
    names = sorted(p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file())
    assert "milepost.json" in names
    assert "training/state.json" in names
    for name in names:
        file = path / name
        for at in (
            {0, file.stat().st_size // 2, file.stat().st_size - 1} if file.stat().st_size else ()
        ):
            flip(file, at)
            result = milepost("verify", path, "--json")
            found = problems(result.json())
            assert name in {problem["file"] for problem in found}, (name, at)
            severities = {p["severity"] for p in found}
            is_info = severities == {"warning"}
            assert result.code == (0 if is_info else 1)
            flip(file, at)
    assert milepost("verify", path).code == 0


def test_a_wrong_byte_of_a_tensor_names_the_tensor(make: Make, milepost: Milepost) -> None:
    path = make(1)
    flip(path / "model.safetensors", 4096 + 5)
    flip(path / "training/optimizer.safetensors", 4096 + 5)
    result = milepost("verify", path)
    assert result.code == 1
    assert "model.safetensors: tensor embed.weight: bytes" in result.out
    tensors = {p["tensor"] for p in problems(milepost("verify", path, "--json").json())}
    assert tensors == {"embed.weight", "embed.weight.exp_avg"}


def test_a_damaged_manifest_is_a_finding_and_not_a_traceback(
    make: Make, milepost: Milepost, tmp_path: Path
) -> None:
    path = make(1)
    make(2)
    manifest = path / "milepost.json"
    for content in (b"", b"{", b"null", manifest.read_bytes()[:-20], b"\xff" * 40):
        manifest.write_bytes(content)
        result = milepost("verify", tmp_path / "run", "--json")
        assert result.code == 1
        assert [p["file"] for p in problems(result.json())] == ["milepost.json"]


def test_a_manifest_that_is_gone_does_not_make_a_foreign_directory(
    make: Make, milepost: Milepost, tmp_path: Path
) -> None:
    path = make(1)
    (path / "milepost.json").unlink()
    for target in (path, tmp_path / "run"):
        result = milepost("verify", target, "--json")
        assert result.code == 1
        assert "milepost.json: missing" in problems(result.json())[0]["message"]


def test_a_directory_that_never_became_a_checkpoint_is_a_finding_of_its_run(
    make: Make, milepost: Milepost, tmp_path: Path
) -> None:
    make(1)
    (tmp_path / "run" / "checkpoint-2").mkdir()
    assert milepost("verify", tmp_path / "run").code == 1


def test_a_foreign_directory_is_checked_in_structure_and_said_to_have_no_digests(
    milepost: Milepost, tmp_path: Path
) -> None:
    result = milepost("verify", foreign(tmp_path / "hf"))
    assert result.code == 0
    assert "structure only: no digests are recorded" in result.out


@pytest.mark.case("V10")
def test_a_part_that_is_missing_cut_or_has_a_renamed_tensor_is_named(
    milepost: Milepost, tmp_path: Path
) -> None:
    missing, cut, renamed = (foreign(tmp_path / name) for name in ("missing", "cut", "renamed"))
    (missing / "model-00003-of-00004.safetensors").unlink()
    part = cut / "model-00002-of-00004.safetensors"
    part.write_bytes(part.read_bytes()[:-10])
    part = renamed / "model-00002-of-00004.safetensors"
    part.write_bytes(part.read_bytes().replace(b"layer.2", b"layer.9"))

    result = milepost("verify", missing, cut, renamed)

    assert result.code == 1
    lines = result.out.splitlines()
    assert "model-00003-of-00004.safetensors" in lines[1]
    assert "model-00002-of-00004.safetensors" in lines[3]
    assert "layer.2" in lines[5]


def test_damage_in_a_trio_and_in_a_pt_file_is_found(milepost: Milepost, tmp_path: Path) -> None:
    write_trio(tmp_path, ["best"], TrioContent(model_state={"w": torch.ones(3)}))
    torch.save({"model_state_dict": {"w": torch.ones(3)}}, tmp_path / "old.pt")
    assert milepost("verify", tmp_path).code == 0
    weights = tmp_path / "best.safetensors"
    flip(weights, weights.stat().st_size - 1)
    (tmp_path / "old.pt").write_bytes((tmp_path / "old.pt").read_bytes()[:-30])
    found = milepost("verify", tmp_path, "--json")
    assert found.code == 1
    assert {p["file"]: p["tensor"] for p in problems(found.json())} == {
        "best.safetensors": "w",
        "old.pt": None,
    }


def test_what_is_not_there_is_an_error_and_the_rest_is_still_checked(
    make: Make, milepost: Milepost, tmp_path: Path
) -> None:
    path = make(1)
    result = milepost("verify", tmp_path / "nothing", path)
    assert result.code == 3
    assert [line.split()[0] for line in result.out.splitlines()[:2]] == ["ERROR", "ok"]
    flip(path / "model.safetensors", 4100)
    assert milepost("verify", tmp_path / "nothing", path).code == 1


def test_functional_builds_the_model_and_runs_it(milepost: Milepost, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1)
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "good")
    result = milepost("verify", tmp_path / "good", "--functional")
    assert result.code == 0
    assert "runs as LlamaForCausalLM" in result.out

    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    model.save_pretrained(tmp_path / "bad")
    result = milepost("verify", tmp_path / "bad", "--functional", "--json")
    assert result.code == 1
    (row,) = result.json()["checkpoints"]
    assert not row["ok"]
    assert "not finite" in row["functional"]["problems"][0]


def test_functional_says_what_it_cannot_run(make: Make, milepost: Milepost) -> None:
    result = milepost("verify", make(1), "--functional")
    assert result.code == 0
    assert "not run: no config.json" in result.out
