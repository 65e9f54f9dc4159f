"""What to-gguf refuses, what it leaves when it fails, and what the command line says."""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import milepost as mp
from milepost.cli.app import make_app
from milepost.errors import (
    DigestMismatchError,
    ExistsError,
    InvalidInputError,
    MissingExtraError,
    StorageError,
)
from milepost.storage.fileops import hooked
from milepost.tools.gguf.convert import converted
from milepost.tools.gguf.tensors import GgufTensor, Kind
from milepost.tools.rewrite.options import Mode, RewriteOptions
from milepost.tools.rewrite.problems import SeveralProblems
from milepost.tools.to_gguf import to_gguf
from tests.tools.gguf.gguf_models import (
    keys_of,
    qwen_tokenizer,
    tensors_of,
    tiny,
    values_of,
    write,
)

DRY = RewriteOptions(mode=Mode.DRY_RUN)
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def change_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_bytes()), **changes}))


def change_tensors(directory: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = dict(load_file(directory / "model.safetensors"))
    change(tensors)
    store(directory, tensors)


def store(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def problems_of(directory: Path) -> list[str]:
    report = to_gguf(directory, directory.parent / "no.gguf", dtype="q8_0", options=DRY)
    assert report.ok == (not report.problems)
    return list(report.problems)


def test_a_dry_run_tells_the_exact_size_and_writes_nothing(tmp_path: Path) -> None:
    tiny("qwen3_moe", tmp_path / "model")
    output = tmp_path / "m.gguf"
    before = to_gguf(tmp_path / "model", output, dtype="q8_0", options=DRY)
    assert before.ok and not output.exists()
    assert [place.name for place in tmp_path.iterdir()] == ["model"]
    after = write(tmp_path / "model", output, "q8_0")
    assert before.files == after.files == {"m.gguf": output.stat().st_size}


def test_a_family_that_is_not_known_is_refused_and_those_that_are_known_are_named(
    tmp_path: Path,
) -> None:
    tiny("llama", tmp_path / "model")
    change_config(tmp_path / "model", model_type="gemma3_text")
    (problem,) = problems_of(tmp_path / "model")
    assert "gemma3_text; to-gguf knows llama, qwen2, qwen2_moe, qwen3, qwen3_moe" in problem


def test_everything_that_is_wrong_is_told_at_once_and_nothing_is_written(tmp_path: Path) -> None:
    tiny("qwen3", tmp_path / "model")

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.2.mtp.weight"] = torch.ones(3)
        del tensors["model.layers.1.self_attn.q_norm.weight"]
        tensors["model.norm.weight"] = torch.ones(5)

    change_tensors(tmp_path / "model", change)
    change_config(tmp_path / "model", hidden_act="gelu", use_sliding_window=True)
    (tmp_path / "model/tokenizer.json").unlink()
    with pytest.raises(SeveralProblems) as caught:
        write(tmp_path / "model", tmp_path / "m.gguf", "f32")
    found = "\n".join(caught.value.problems)
    for part in (
        "1 tensors have no place in a GGUF file of qwen3: model.layers.2.mtp.weight",
        "1 tensors that the model needs are not there: model.layers.1.self_attn.q_norm.weight",
        "model.norm.weight: shape (5,) in the checkpoint, (64,) by config.json",
        "hidden_act is 'gelu'",
        "use_sliding_window is True",
        "a GGUF file needs its tokenizer",
    ):
        assert part in found
    assert [place.name for place in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("family", "changes", "part"),
    [
        ("qwen2_moe", {"norm_topk_prob": True}, "never normalise"),
        ("qwen3_moe", {"norm_topk_prob": False}, "always normalise"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, "experts in every layer"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "experts in every layer"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ("llama", {"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor"),
        (
            "qwen2",
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "mscale": 1.0}},
            "mscale",
        ),
        ("llama", {"hidden_size": None}, "hidden_size is not there"),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}, "quantised"),
    ],
)
def test_what_readers_would_compute_otherwise_is_refused(
    family: str, changes: dict[str, Any], part: str, tmp_path: Path
) -> None:
    tiny(family, tmp_path / "model")
    change_config(tmp_path / "model", **changes)
    with pytest.raises(InvalidInputError, match=part):
        write(tmp_path / "model", tmp_path / "m.gguf", "f32")
    assert not (tmp_path / "m.gguf").exists()


def test_a_tied_head_is_left_out_when_it_is_the_embedding_and_refused_when_it_is_not(
    tmp_path: Path,
) -> None:
    tiny("qwen2", tmp_path / "model")
    change_tensors(tmp_path / "model", lambda t: t.update({HEAD: t[EMBEDDING].clone()}))
    report = write(tmp_path / "model", tmp_path / "m.gguf", "f32")
    assert list(report.dropped) == [HEAD] and "ties it" in report.dropped[HEAD]
    assert "output.weight" not in tensors_of(tmp_path / "m.gguf")
    change_tensors(tmp_path / "model", lambda t: t[HEAD][3].add_(1))
    with pytest.raises(InvalidInputError, match="with other values"):
        write(tmp_path / "model", tmp_path / "n.gguf", "f32")
    assert not (tmp_path / "n.gguf").exists()
    change_config(tmp_path / "model", tie_word_embeddings=False)
    write(tmp_path / "model", tmp_path / "n.gguf", "f32")
    assert "output.weight" in tensors_of(tmp_path / "n.gguf")


def test_frequencies_of_old_checkpoints_are_left_out_with_the_reason(tmp_path: Path) -> None:
    tiny("llama", tmp_path / "model")
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change_tensors(tmp_path / "model", lambda t: t.update({name: torch.ones(8)}))
    report = write(tmp_path / "model", tmp_path / "m.gguf", "f32")
    assert list(report.dropped) == [name]


def test_a_configuration_of_older_form_says_the_same(tmp_path: Path) -> None:
    tiny("llama", tmp_path / "model")
    scaling = {"type": "linear", "factor": 4.0}
    change_config(tmp_path / "model", rope_parameters=None, rope_scaling=scaling, rope_theta=7e5)
    change_config(tmp_path / "model", head_dim=None)
    write(tmp_path / "model", tmp_path / "m.gguf", "f32")
    keys = keys_of(tmp_path / "m.gguf")
    assert keys["llama.rope.freq_base"] == 7e5 and keys["llama.rope.scaling.factor"] == 4.0
    assert keys["llama.rope.dimension_count"] == 16


def test_a_model_that_was_loaded_from_a_gguf_file_can_be_written_again(tmp_path: Path) -> None:
    tiny("llama", tmp_path / "model")
    change_config(tmp_path / "model", quantization_config={"quant_method": "gguf"})
    write(tmp_path / "model", tmp_path / "m.gguf", "f32")
    name = "model.layers.0.mlp.up_proj.weight"
    change_tensors(tmp_path / "model", lambda t: t.update({name: t[name].to(torch.uint8)}))
    with pytest.raises(InvalidInputError, match="U8 values mean nothing"):
        write(tmp_path / "model", tmp_path / "n.gguf", "f32")


def test_the_place_of_the_output_is_checked(tmp_path: Path) -> None:
    tiny("llama", tmp_path / "model")
    (tmp_path / "m.gguf").write_bytes(b"mine")
    with pytest.raises(ExistsError):
        write(tmp_path / "model", tmp_path / "m.gguf", "f32")
    assert (tmp_path / "m.gguf").read_bytes() == b"mine"
    for name, part in (("model/m.gguf", "lies in the input"), ("m.bin", "ends in .gguf")):
        with pytest.raises(InvalidInputError, match=part):
            write(tmp_path / "model", tmp_path / name, "f32")
    with pytest.raises(InvalidInputError, match="f32, f16, bf16, q8_0"):
        write(tmp_path / "model", tmp_path / "n.gguf", "q4_k")
    parts = RewriteOptions(max_shard_size="1GB")
    with pytest.raises(InvalidInputError, match="one file"):
        to_gguf(tmp_path / "model", tmp_path / "n.gguf", dtype="f32", options=parts)


def test_values_that_the_type_cannot_hold_leave_no_file(tmp_path: Path) -> None:
    tiny("llama", tmp_path / "model")
    name = "model.layers.1.mlp.up_proj.weight"
    for value, dtype in ((1e6, "f16"), (float("inf"), "q8_0"), (float("nan"), "q8_0")):
        tensors = dict(load_file(tmp_path / "model/model.safetensors"))
        tensors[name].view(-1)[77] = value
        store(tmp_path / "model", tensors)
        with pytest.raises(InvalidInputError, match=name):
            write(tmp_path / "model", tmp_path / "m.gguf", dtype)
        assert [place.name for place in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("operation", ["write", "reserve", "fsync", "rename"])
def test_a_disk_that_fails_leaves_no_file(operation: str, tmp_path: Path) -> None:
    tiny("llama", tmp_path / "model")

    def fail(name: str, target: str, function: Any, arguments: tuple[Any, ...]) -> Any:
        if name == operation:
            raise OSError(errno.EIO, "the disk failed", target)
        return function(*arguments)

    with hooked(fail), pytest.raises(StorageError):
        to_gguf(tmp_path / "model", tmp_path / "m.gguf", dtype="q8_0")
    assert [place.name for place in tmp_path.iterdir()] == ["model"]


def test_bytes_that_are_not_those_that_were_saved_leave_no_file(tmp_path: Path) -> None:
    model = tiny("qwen3", tmp_path / "hub")
    mp.save(tmp_path / "step-1", {"model": model}, step=1, processing_class=qwen_tokenizer())
    path = tmp_path / "step-1/model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1000] ^= 1
    path.write_bytes(data)
    with pytest.raises(DigestMismatchError):
        write(tmp_path / "step-1", tmp_path / "m.gguf", "f32")
    assert not list(tmp_path.glob("*.gguf")) and not list(tmp_path.glob(".m.gguf*"))


def test_blocks_of_zeros_and_of_the_smallest_numbers_are_zeros_in_q8_0() -> None:
    tensor = GgufTensor(name="w", shape=(3, 32), kind=Kind.Q8_0)
    values = torch.zeros(3, 32)
    values[1] = 1e-42
    values[2] = torch.linspace(-1, 1, 32)
    blocks = converted(values, tensor, "w").reshape(3, 34)
    assert not blocks[:2].any()
    assert blocks[2].view(torch.int8)[2] == -127 and blocks[2].view(torch.int8)[33] == 127


def test_the_command_writes_tells_and_refuses(tmp_path: Path) -> None:
    tiny("llama", tmp_path / "model")
    given = ["to-gguf", "--input_dir", str(tmp_path / "model"), "--dtype", "q8_0", "--json"]
    output = ["--output_file", str(tmp_path / "m.gguf")]
    app, runner = make_app(), CliRunner()
    told = runner.invoke(app, [*given, *output, "--dry-run"])
    assert told.exit_code == 0 and not (tmp_path / "m.gguf").exists()
    done = runner.invoke(app, [*given, *output, "--check"])
    assert done.exit_code == 0, done.output
    files = json.loads(done.stdout)["files"]
    assert files == json.loads(told.stdout)["files"]
    assert files == {"m.gguf": (tmp_path / "m.gguf").stat().st_size}
    again = runner.invoke(app, [*given, *output, "--dry-run"])
    assert again.exit_code == 1 and "is there already" in json.loads(again.stdout)["problems"][0]
    assert runner.invoke(app, [*given, *output]).exit_code == 5


def test_without_the_package_the_command_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny("llama", tmp_path / "model")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingExtraError, match=r"milepost\[gguf\]"):
        write(tmp_path / "model", tmp_path / "m.gguf", "f32")


def test_small_bands_make_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny("llama", tmp_path / "model")
    write(tmp_path / "model", tmp_path / "large.gguf", "q8_0")
    monkeypatch.setattr("milepost.tools.gguf.write._BAND_NUMEL", 100)
    write(tmp_path / "model", tmp_path / "small.gguf", "q8_0")
    large, small = (tmp_path / f"{name}.gguf" for name in ("large", "small"))
    assert large.read_bytes() == small.read_bytes()
    assert values_of(tensors_of(small)["token_embd.weight"]).abs().sum() > 0
