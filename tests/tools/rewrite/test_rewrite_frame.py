"""The frame of after-training verbs: what it takes, what it makes, all of it or nothing."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import milepost as mp
from milepost.engine.write import Durability, WriteOptions
from milepost.errors import (
    CheckpointIncompleteError,
    DamagedError,
    ExistsError,
    FormatError,
    InvalidInputError,
    NoSpaceError,
    StorageError,
)
from milepost.layouts.checkpoint import Checkpoint
from milepost.storage import fileops
from milepost.tools.cast import cast
from milepost.tools.rename import rename
from milepost.tools.reshard import reshard
from milepost.tools.rewrite.groups import Computed, TensorSpec, block_of, joined, passed
from milepost.tools.rewrite.options import Check, Mode, RewriteOptions
from milepost.tools.rewrite.problems import SeveralProblems
from milepost.tools.rewrite.rewrite import Rewrite
from milepost.tools.rewrite.run import run_rewrite
from milepost.tools.rewrite.source import Source, open_source
from tests.hf.conftest import make_model, make_tokenizer
from tests.tools.rewrite.hub import QUICK, content, read_hub, same_bits, write_hub
from tests.tools.rewrite.memory import peak_anon_nbytes


def some_tensors(*, seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {
        "model.embed.weight": torch.randn(40, 16),
        "model.norm.weight": torch.ones(16, dtype=torch.float32),
        "model.layers.0.w": torch.randn(33, 16).bfloat16(),
        "model.layers.0.mask": torch.tensor([True, False, True]),
        "model.layers.1.w": torch.randn(5, 7, 3).half(),
        "model.steps": torch.tensor(12, dtype=torch.int64),
        "model.empty": torch.empty(0, 4),
        "model.q": torch.randn(8, 16).to(torch.float8_e4m3fn),
    }


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    config = {"model_type": "something", "torch_dtype": "float32", "text_config": {"dtype": "x"}}
    return write_hub(tmp_path / "in", some_tensors(), config=config, parts=3)


def save_run(path: Path) -> Path:
    """A training checkpoint with optimizer state."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Linear(64, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 16)).sum().backward()
    optimizer.step()
    options = WriteOptions(durability=Durability.PAGE_CACHE, threads=1)
    mp.save(path, {"model": model, "optimizer": optimizer}, step=7, options=options)
    return path


def test_parts_of_another_size_hold_the_same_bits_and_load(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = make_model("llama", tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "in")
    make_tokenizer().save_pretrained(tmp_path / "in")
    options = RewriteOptions(max_shard_size="3KB", check=Check.LOAD, is_durable=False)

    report = reshard(tmp_path / "in", tmp_path / "out", options=options)

    assert len([name for name in report.files if name.endswith(".safetensors")]) > 4
    assert same_bits(read_hub(tmp_path / "out"), read_hub(tmp_path / "in"))
    assert report.unchanged == report.tensors == len(read_hub(tmp_path / "in"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert same_bits(loaded.state_dict(), model.state_dict())
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("quick fox")["input_ids"]
    assert report.check is not None and report.check.model_class == "LlamaForCausalLM"
    assert report.check.parameters == report.parameters


@pytest.mark.case("V11")
def test_only_a_tensor_above_the_limit_makes_a_larger_part_and_sizes_count_tensors_alone(
    tmp_path: Path,
) -> None:
    tensors = {name: torch.zeros(100) for name in "abc"} | {"big": torch.zeros(750)}
    source = write_hub(tmp_path / "in", tensors)
    options = RewriteOptions(max_shard_size="1KB", is_durable=False)
    reshard(source, tmp_path / "out", options=options)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_bytes())
    assert index["metadata"]["total_size"] == 3 * 400 + 3000
    held: dict[str, list[str]] = {}
    for name, part in index["weight_map"].items():
        held.setdefault(part, []).append(name)
    assert sorted(map(sorted, held.values())) == [["a", "b"], ["big"], ["c"]]
    assert sorted(held) == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]


def test_every_dtype_an_empty_tensor_and_a_scalar_pass_and_are_proven(
    hub: Path, tmp_path: Path
) -> None:
    reshard(hub, tmp_path / "out", options=QUICK)
    assert same_bits(read_hub(tmp_path / "out"), some_tensors())
    checkpoint = Checkpoint.open(tmp_path / "out")
    verdict = checkpoint.verify()
    assert verdict.ok and verdict.has_digests
    made_by = checkpoint.info.extra["provenance"]["made_by"]
    assert made_by["verb"] == "reshard"
    assert made_by["inputs"][0]["name"] == "in"


def test_the_output_is_the_same_for_any_number_of_threads(hub: Path, tmp_path: Path) -> None:
    for threads in (1, 2, 5):
        options = RewriteOptions(max_shard_size="1KB", threads=threads, is_durable=False)
        cast(hub, tmp_path / f"out{threads}", dtype="float32", options=options)
    parts = [
        {name: raw for name, raw in content(tmp_path / f"out{n}").items() if "safetensors" in name}
        for n in (1, 2, 5)
    ]
    assert parts[0] == parts[1] == parts[2]


def test_the_weights_of_a_training_checkpoint_are_taken_and_its_step_is_kept(
    tmp_path: Path,
) -> None:
    run = save_run(tmp_path / "run/checkpoint-7")
    reshard(run, tmp_path / "out", options=QUICK)
    made = Checkpoint.open(tmp_path / "out")
    assert made.info.step == 7
    assert made.info.extra["parent_id"] == Checkpoint.open(run).info.checkpoint_id
    assert same_bits(made.read_weights(), Checkpoint.open(run).read_weights())
    kept = [file.name for file in made.files() if file.name.startswith("training/")]
    assert kept == ["training/digests.bin"]
    made_by = made.info.extra["provenance"]["made_by"]
    assert made_by["inputs"][0]["checkpoint_id"] == Checkpoint.open(run).info.checkpoint_id
    cast(tmp_path / "out", tmp_path / "again", dtype="bf16", options=QUICK)
    again = Checkpoint.open(tmp_path / "again").info.extra["provenance"]
    assert [step["verb"] for step in (*again["made_before"], again["made_by"])] == [
        "reshard",
        "cast",
    ]


@pytest.mark.parametrize("layout", ["single-file", "trio"])
def test_layouts_without_safetensors_parts_are_inputs_too(tmp_path: Path, layout: str) -> None:
    from milepost.tools.export import ExportTarget, export_checkpoint

    run = save_run(tmp_path / "run/checkpoint-7")
    place = tmp_path / ("old.pt" if layout == "single-file" else "old")
    export_checkpoint(run, place, to=ExportTarget(layout))
    weights = Checkpoint.open(run).read_weights()
    cast(place, tmp_path / "cast", dtype="bfloat16", options=QUICK)
    assert same_bits(
        read_hub(tmp_path / "cast"), {name: w.bfloat16() for name, w in weights.items()}
    )
    with open_source(place) as source:
        tensor = source["0.weight"]
        row = block_of(tensor, "row", rows=(3, 5))
        rewrite = Rewrite(verb="cut", sources=[source], groups=[row], dropped=others(source))
        run_rewrite(rewrite, tmp_path / "cut", QUICK)
    assert same_bits(read_hub(tmp_path / "cut"), {"row": weights["0.weight"][3:5]})


def others(source: Source) -> dict[str, str]:
    return dict.fromkeys(source.tensors, "not wanted here")


def test_a_flipped_bit_of_the_input_is_found_and_nothing_is_left(tmp_path: Path) -> None:
    run = save_run(tmp_path / "run/checkpoint-7")
    part = run / "model.safetensors"
    raw = bytearray(part.read_bytes())
    raw[-100] ^= 1
    part.write_bytes(raw)
    for number, attempt in enumerate((reshard, lambda *a, **k: cast(*a, dtype="bf16", **k))):
        with pytest.raises(DamagedError, match=r"are not\s+those that were saved"):
            attempt(run, tmp_path / "new" / f"out{number}", options=QUICK)
    assert os.listdir(tmp_path / "new") == []


@pytest.mark.case("V10")
def test_missing_cut_and_foreign_parts_stop_a_verb_before_it_begins(
    hub: Path, tmp_path: Path
) -> None:
    third = hub / "model-00003-of-00003.safetensors"
    raw = third.read_bytes()
    third.unlink()
    with pytest.raises(CheckpointIncompleteError, match="model-00003"):
        reshard(hub, tmp_path / "out", options=QUICK)
    third.write_bytes(raw[:-10])
    with pytest.raises(FormatError, match="model-00003"):
        reshard(hub, tmp_path / "out", options=QUICK)
    third.write_bytes(raw.replace(b"layers.0.w", b"layers.9.w"))
    with pytest.raises(CheckpointIncompleteError, match="model-00003"):
        reshard(hub, tmp_path / "out", options=QUICK)
    assert not (tmp_path / "out").exists()


def test_slices_of_ranks_point_to_the_verb_that_merges_them(tmp_path: Path) -> None:
    source = write_hub(tmp_path / "in", {"experts.w.shard_0": torch.zeros(2)})
    (source / "model.safetensors.index.json").write_text(
        json.dumps(
            {
                "metadata": {"format": "ep_sharded", "ep_size": 1},
                "weight_map": {"experts.w.shard_0": "model.safetensors"},
            }
        )
    )
    with pytest.raises(FormatError, match="merge-ep-shards"):
        reshard(source, tmp_path / "out", options=QUICK)


def test_an_output_that_is_there_or_lies_in_the_input_is_refused(hub: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(ExistsError, match="taken"):
        reshard(hub, tmp_path / "taken", options=QUICK)
    (tmp_path / "link").symlink_to(hub)
    for place in (hub, tmp_path / "link"):
        with pytest.raises(InvalidInputError, match="is an input"):
            reshard(hub, place, options=QUICK)
    with pytest.raises(InvalidInputError, match="lies in the input"):
        reshard(hub, tmp_path / "link/deeper/out", options=QUICK)
    assert sorted(os.listdir(tmp_path)) == ["in", "link", "taken"]


def test_a_dry_run_tells_every_problem_and_the_sizes_and_writes_nothing(
    hub: Path, tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    options = RewriteOptions(mode=Mode.DRY_RUN, max_shard_size="1KB")
    report = cast(hub, tmp_path / "out", dtype="bf16", keep=["nope*", "re:no"], options=options)
    assert len(report.problems) == 3 and not report.ok
    assert os.listdir(tmp_path / "out") == []
    with pytest.raises(SeveralProblems) as raised:
        cast(hub, tmp_path / "out", dtype="bf16", keep=["nope*", "re:no"], options=QUICK)
    assert raised.value.problems == report.problems
    (tmp_path / "out").rmdir()
    planned = cast(hub, tmp_path / "out", dtype="bf16", options=options)
    assert planned.ok and not (tmp_path / "out").exists()
    small = RewriteOptions(max_shard_size="1KB", is_durable=False)
    written = cast(hub, tmp_path / "out", dtype="bf16", options=small)
    later = {"milepost.json", "training/digests.bin"}
    assert {n: s for n, s in written.files.items() if n not in later} == planned.files
    sizes = {name: len(raw) for name, raw in content(tmp_path / "out").items()}
    assert sizes == written.files
    assert planned.memory_nbytes == written.memory_nbytes


def test_too_little_room_is_found_before_anything_is_written(
    hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.statvfs

    def full(path: Any) -> os.statvfs_result:
        found = list(real(path))
        found[3] = found[4] = 0
        return os.statvfs_result(found)

    monkeypatch.setattr(os, "statvfs", full)
    with pytest.raises(NoSpaceError):
        reshard(hub, tmp_path / "out", options=QUICK)
    assert os.listdir(tmp_path) == ["in"]


@pytest.mark.parametrize("operation", ["mkdir", "open", "write", "fsync", "rename"])
def test_when_the_disk_fails_nothing_is_left(hub: Path, tmp_path: Path, operation: str) -> None:
    def fail(name: str, target: str, function: Any, arguments: tuple[Any, ...]) -> Any:
        if name == operation and "out" in target:
            raise OSError(5, "Input/output error", target)
        return function(*arguments)

    with pytest.raises(StorageError), fileops.hooked(fail):
        cast(hub, tmp_path / "out", dtype="bf16", options=RewriteOptions(threads=2))
    assert os.listdir(tmp_path) == ["in"]


def test_what_a_dead_process_left_for_the_same_output_goes_away(hub: Path, tmp_path: Path) -> None:
    from milepost.storage.owned_names import owned_name

    name = owned_name(tmp_path / "out").name
    process = f"-{os.getpid()}-"
    dead = tmp_path / name.replace(process, "-4194304-")
    (dead / "training").mkdir(parents=True)
    (dead / "training/part").write_bytes(b"half")
    alive = tmp_path / name
    alive.mkdir()
    reshard(hub, tmp_path / "out", options=QUICK)
    assert sorted(os.listdir(tmp_path)) == sorted([alive.name, "in", "out"])


def test_a_group_that_raises_stops_the_run_and_nothing_is_published(
    hub: Path, tmp_path: Path
) -> None:
    def refuse(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        raise InvalidInputError("w: not finite")

    source = open_source(hub)
    groups: list[Any] = [
        passed(t) for t in source.tensors.values() if t.name != "model.embed.weight"
    ]
    tensor = source["model.embed.weight"]
    spec = TensorSpec(name="w", dtype="F32", shape=tensor.shape)
    groups.append(Computed(inputs={"w": tensor}, outputs=(spec,), make=refuse))
    with pytest.raises(InvalidInputError, match="not finite"):
        run_rewrite(Rewrite(verb="x", sources=[source], groups=groups), tmp_path / "out", QUICK)
    assert os.listdir(tmp_path) == ["in"]


@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_blocks_joined_again_are_the_tensor(data: Any, tmp_path_factory: Any) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=2, max_size=4)))
    base = tmp_path_factory.mktemp("blocks")
    tensor = torch.arange(torch.Size(shape).numel(), dtype=torch.int32).view(shape)
    cut = data.draw(st.integers(1, len(shape) - 1))
    with open_source(write_hub(base / "in", {"t": tensor})) as source:
        groups = []
        for number in range(torch.Size(shape[:cut]).numel()):
            at = tuple(int(i) for i in torch.unravel_index(torch.tensor(number), shape[:cut]))
            for row in range(shape[cut]):
                groups.append(block_of(source["t"], f"t.{number}.{row}", *at, rows=(row, row + 1)))
        run_rewrite(Rewrite(verb="cut", sources=[source], groups=groups), base / "cut", QUICK)
    blocks = read_hub(base / "cut")
    assert torch.equal(blocks["t.0.0"][0], tensor[(0,) * (cut + 1)])
    with open_source(base / "cut") as source:
        rewrite = Rewrite(
            verb="join",
            sources=[source],
            groups=[joined("t", shape, [source[group.output.name] for group in groups])],
        )
        run_rewrite(rewrite, base / "out", QUICK)
    assert same_bits(read_hub(base / "out"), {"t": tensor})


def test_bands_give_what_the_whole_gives_and_may_mix_with_whole_inputs(tmp_path: Path) -> None:
    torch.manual_seed(0)
    w, b, a = torch.randn(3000, 700), torch.randn(3000, 4), torch.randn(4, 700)
    source = open_source(write_hub(tmp_path / "in", {"w": w, "b": b, "a": a}))
    seen: list[int] = []

    def make(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        seen.append(len(tensors["w"]))
        assert tensors["a"].shape == (4, 700)
        return {"w": tensors["w"] + tensors["b"] @ tensors["a"], "norm": tensors["w"][:, 0]}

    group = Computed(
        inputs={name: source[name] for name in "wba"},
        outputs=(
            TensorSpec(name="w", dtype="F32", shape=(3000, 700)),
            TensorSpec(name="norm", dtype="F32", shape=(3000,)),
        ),
        make=make,
        banded=("w", "b"),
    )
    run_rewrite(Rewrite(verb="add", sources=[source], groups=[group]), tmp_path / "out", QUICK)
    assert len(seen) > 3 and sum(seen) == 3000
    made = read_hub(tmp_path / "out")
    torch.testing.assert_close(made["w"], w + b @ a)
    assert torch.equal(made["norm"], w[:, 0])


def test_tensors_that_nothing_reads_are_never_lost_without_a_word(
    hub: Path, tmp_path: Path
) -> None:
    source = open_source(hub)
    groups = [passed(tensor) for tensor in list(source.tensors.values())[:-1]]
    with pytest.raises(AssertionError, match="go nowhere"):
        run_rewrite(Rewrite(verb="x", sources=[source], groups=groups), tmp_path / "out", QUICK)


@pytest.mark.case("V08")
def test_a_cast_rounds_as_torch_does_and_config_says_the_new_type_in_both_spellings(
    hub: Path, tmp_path: Path
) -> None:
    keep = ["*norm.weight"]
    cast(hub, tmp_path / "out", dtype="bf16", keep=keep, options=QUICK)
    expected = {
        name: tensor.bfloat16()
        if tensor.dtype in (torch.float32, torch.float16) and "norm" not in name
        else tensor
        for name, tensor in some_tensors().items()
    }
    assert same_bits(read_hub(tmp_path / "out"), expected)
    config = json.loads((tmp_path / "out/config.json").read_bytes())
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    assert config["text_config"]["dtype"] == "bfloat16"


def test_a_value_that_would_become_infinite_is_refused_naming_its_tensor(tmp_path: Path) -> None:
    tensors = {"fine": torch.tensor([1.0, float("inf")]), "big": torch.full((3,), 1e6)}
    source = write_hub(tmp_path / "in", tensors)
    with pytest.raises(InvalidInputError, match="big: 3 values are too large for float16"):
        cast(source, tmp_path / "out", dtype="float16", options=QUICK)
    write_hub(tmp_path / "in", {"fine": tensors["fine"]})
    cast(source, tmp_path / "out", dtype="float16", options=QUICK)
    assert read_hub(tmp_path / "out")["fine"].tolist() == [1.0, float("inf")]


def test_codes_of_a_quantised_model_are_not_cast(tmp_path: Path) -> None:
    config = {"quantization_config": {"quant_method": "fp8"}}
    source = write_hub(tmp_path / "in", {"w": torch.ones(2)}, config=config)
    with pytest.raises(InvalidInputError, match=r"quantised \(fp8\)"):
        cast(source, tmp_path / "out", dtype="bf16", options=QUICK)


def test_names_change_by_rules_and_two_that_become_one_are_refused(
    hub: Path, tmp_path: Path
) -> None:
    rules = [(r"^model\.", "backbone."), (r"layers\.(\d+)", r"blocks.\1")]
    report = rename(hub, tmp_path / "out", rules=rules, options=QUICK)
    expected = {
        name.replace("model.", "backbone.").replace("layers", "blocks"): tensor
        for name, tensor in some_tensors().items()
    }
    assert same_bits(read_hub(tmp_path / "out"), expected)
    assert report.counts == {"renamed": 8}
    with pytest.raises(InvalidInputError, match="two tensors of the output"):
        rename(hub, tmp_path / "two", rules=[(r"layers\.\d", "layers.0")], options=QUICK)
    with pytest.raises(InvalidInputError, match="fits no tensor"):
        rename(hub, tmp_path / "none", rules=[("nothing", "x")], options=QUICK)


def test_ties_follow_a_rename(tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({"e": torch.nn.Linear(4, 4), "h": torch.nn.Linear(4, 4)})
    model["h"].weight = model["e"].weight
    options = WriteOptions(durability=Durability.PAGE_CACHE)
    mp.save(tmp_path / "checkpoint-1", {"model": model}, step=1, options=options)
    rename(tmp_path / "checkpoint-1", tmp_path / "out", rules=[("^", "model.")], options=QUICK)
    assert Checkpoint.open(tmp_path / "out").tied == {"model.h.weight": "model.e.weight"}


IMPORTS = """
from milepost.tools.cast import cast
from milepost.tools.reshard import reshard
from milepost.tools.rewrite.options import RewriteOptions
"""
WORK = """
options = RewriteOptions(threads=2, is_durable=False)
if sys.argv[3] == "cast":
    cast(sys.argv[1], sys.argv[2], dtype="float32", options=options)
else:
    reshard(sys.argv[1], sys.argv[2], options=options)
"""


@pytest.mark.parametrize("verb", ["cast", "reshard"])
def test_memory_does_not_grow_with_the_input(tmp_path: Path, verb: str) -> None:
    peaks = []
    for megabytes in (32, 128):
        source = tmp_path / f"in{megabytes}"
        tensors = {f"w{n}": torch.ones(2048, 2048).bfloat16() for n in range(megabytes // 8)}
        write_hub(source, tensors, parts=2)
        peaks.append(peak_anon_nbytes(IMPORTS, WORK, source, tmp_path / f"out{megabytes}", verb))
    assert max(peaks) <= 2 * 8 * 2**20 + 64 * 2**20
    assert peaks[1] - peaks[0] <= 24 * 2**20, peaks


@pytest.mark.slow
def test_memory_is_flat_over_inputs_of_half_a_gigabyte_to_two(tmp_path: Path) -> None:
    peaks = []
    for megabytes in (512, 1024, 2048):
        source, out = tmp_path / f"in{megabytes}", tmp_path / f"out{megabytes}"
        tensor = torch.ones(4096, 4096).bfloat16()
        tensors = {f"w{number}": tensor.clone() for number in range(megabytes // 32)}
        write_hub(source, tensors, parts=4)
        peaks.append(peak_anon_nbytes(IMPORTS, WORK, source, out, "cast"))
        shutil.rmtree(source)
        shutil.rmtree(out)
    assert max(peaks) <= 2 * 32 * 2**20 + 64 * 2**20
    assert max(peaks) - min(peaks) <= 24 * 2**20, peaks
