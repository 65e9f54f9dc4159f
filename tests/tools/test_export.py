"""Exports: complete, exact, bounded in memory, all or nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from milepost.checkpointing.load import load
from milepost.checkpointing.save import save
from milepost.engine.write import Durability, WriteOptions
from milepost.errors import DamagedError, ExistsError, InvalidInputError, StorageError
from milepost.format.manifest import encode_manifest
from milepost.layouts.checkpoint import Checkpoint, Layout
from milepost.layouts.directory import DirectoryCheckpoint
from milepost.layouts.trio import TrioCheckpoint, TrioContent, write_trio
from milepost.storage import fileops
from milepost.tools.export import ExportTarget, TrainingState, export_checkpoint
from tests.hf.conftest import make_model, make_tokenizer
from tests.tools.rewrite.memory import peak_anon_nbytes

QUICK = WriteOptions(durability=Durability.PAGE_CACHE, threads=2)


def make_training() -> dict[str, Any]:
    model = make_model("llama", tie_word_embeddings=True)
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=0.01
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10)
    model(input_ids=torch.arange(8)[None]).logits.sum().backward()
    optimizer.step()
    scheduler.step()
    progress = {"tokens": 123}
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "progress": progress,
    }


def make_checkpoint(path: Path, state: dict[str, Any]) -> Path:
    save(
        path / "checkpoint-7",
        state,
        step=7,
        epoch=2.0,
        metrics={"loss": 0.5},
        processing_class=make_tokenizer(),
        options=QUICK,
    )
    return path / "checkpoint-7"


def set_needs(checkpoint: Path, *names: str) -> None:
    handle = DirectoryCheckpoint(checkpoint)
    handle.manifest.needs = list(names)
    (checkpoint / "milepost.json").write_bytes(encode_manifest(handle.manifest))


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        a.dtype == second[name].dtype and torch.equal(a, second[name]) for name, a in first.items()
    )


def test_a_directory_is_a_complete_hugging_face_model_without_training_state(
    tmp_path: Path,
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    state = make_training()
    source = make_checkpoint(tmp_path, state)
    out = tmp_path / "deep" / "out"

    report = export_checkpoint(source, out, max_shard_size="2KB", options=QUICK)

    assert not (out / "trainer_state.json").exists()
    parts = sorted(path.name for path in out.glob("*.safetensors"))
    assert len(parts) > 2
    index = json.loads((out / "model.safetensors.index.json").read_bytes())
    assert sorted(set(index["weight_map"].values())) == parts
    model = AutoModelForCausalLM.from_pretrained(out)
    assert same(dict(model.state_dict()), dict(state["model"].state_dict()))
    assert AutoTokenizer.from_pretrained(out)("quick fox")["input_ids"]
    assert "milepost" in (out / "README.md").read_text()
    exported = Checkpoint.open(out)
    assert exported.verify().ok
    assert exported.verify().has_digests
    assert exported.info.step == 7
    assert exported.info.extra["parent_id"] == Checkpoint.open(source).info.checkpoint_id
    files = {p.relative_to(out).as_posix(): p for p in out.rglob("*") if p.is_file()}
    assert set(report.files) == set(files)
    assert report.nbytes == sum(path.stat().st_size for path in files.values())
    assert [name for name in files if name.startswith("training/")] == ["training/digests.bin"]


def test_metrics_that_are_no_finite_numbers_come_along_as_text(tmp_path: Path) -> None:
    state = make_training()
    metrics = {"loss": float("nan"), "best": 0.25}
    save(tmp_path / "checkpoint-7", state, step=7, metrics=metrics, options=QUICK)
    export_checkpoint(tmp_path / "checkpoint-7", tmp_path / "out", options=QUICK)
    assert dict(Checkpoint.open(tmp_path / "out").info.metrics) == {"loss": "nan", "best": 0.25}


def test_training_state_goes_along_when_asked_and_resumes_exactly(tmp_path: Path) -> None:
    state = make_training()
    source = make_checkpoint(tmp_path, state)
    out = tmp_path / "out"
    export_checkpoint(
        source, out, training_state=TrainingState.INCLUDE, max_shard_size="2KB", options=QUICK
    )
    fresh = make_training()
    with torch.no_grad():
        for parameter in fresh["model"].parameters():
            parameter.zero_()
    fresh["progress"]["tokens"] = 0
    report = load(out, fresh)
    assert report.level.value == "exact"
    assert same(dict(fresh["model"].state_dict()), dict(state["model"].state_dict()))
    assert fresh["progress"] == {"tokens": 123}
    for old, new in zip(
        state["optimizer"].state.values(), fresh["optimizer"].state.values(), strict=True
    ):
        assert same(old, new)


@pytest.mark.parametrize("with_state", list(TrainingState))
def test_a_trio_holds_the_weights_and_what_was_asked_for(
    tmp_path: Path, with_state: TrainingState
) -> None:
    state = make_training()
    source = make_checkpoint(tmp_path, state)
    export_checkpoint(
        source, tmp_path / "t" / "best", to=ExportTarget.TRIO, training_state=with_state
    )
    trio = Checkpoint.open(tmp_path / "t" / "best")
    assert isinstance(trio, TrioCheckpoint)
    assert trio.verify().ok
    assert same(trio.read_weights(), dict(state["model"].state_dict()))
    assert (trio.info.step, trio.info.epoch, trio.info.loss) == (7, 1, 0.5)
    assert trio.info.model_config["model_type"] == "llama"
    loaded = trio.training_state()
    if with_state is TrainingState.LEAVE_OUT:
        assert not loaded
        return
    fresh = make_training()
    fresh["optimizer"].load_state_dict(loaded["optimizer_state"])
    fresh["scheduler"].load_state_dict(loaded["scheduler_state"])
    assert fresh["scheduler"].state_dict() == state["scheduler"].state_dict()
    assert loaded["extra_state"] == {"progress": {"tokens": 123}}
    old, new = state["optimizer"].state_dict(), fresh["optimizer"].state_dict()
    assert old["param_groups"] == new["param_groups"]
    assert all(same(old["state"][number], new["state"][number]) for number in old["state"])


def test_a_single_file_is_what_torch_load_reads_safely(tmp_path: Path) -> None:
    state = make_training()
    source = make_checkpoint(tmp_path, state)
    out = tmp_path / "x.pt"
    export_checkpoint(
        source, out, to=ExportTarget.SINGLE_FILE, training_state=TrainingState.INCLUDE
    )
    payload = torch.load(out, weights_only=True)
    assert same(dict(payload["model_state"]), dict(state["model"].state_dict()))
    assert payload["step"] == payload["metadata"]["step"] == 7
    assert payload["config"]["model_type"] == "llama"
    numbers = state["optimizer"].state_dict()["state"]
    assert payload["optimizer"]["state"].keys() == numbers.keys()
    assert Checkpoint.open(out).layout is Layout.SINGLE_FILE


def test_a_trio_or_pt_file_becomes_a_hugging_face_directory_by_its_config(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = make_model("llama", tie_word_embeddings=True)
    config = model.config.to_dict()
    weights = model.state_dict()
    write_trio(tmp_path, ["best"], TrioContent(model_state=weights, model_config=config, epoch=3))
    plain = {name: value for name, value in config.items() if name != "dtype"}
    torch.save({"model_state": weights, "config": plain, "step": 9}, tmp_path / "old.pt")
    for name, step in (("best", 0), ("old.pt", 9)):
        out = tmp_path / f"{name}-out"
        export_checkpoint(tmp_path / name, out, options=QUICK)
        loaded = AutoModelForCausalLM.from_pretrained(out)
        assert same(dict(loaded.state_dict()), dict(weights))
        assert Checkpoint.open(out).info.step == step


def test_a_foreign_directory_keeps_its_files_and_loses_its_trainers(tmp_path: Path) -> None:
    source = tmp_path / "hf"
    (source / "additional_chat_templates").mkdir(parents=True)
    save_file({"w": torch.ones(3)}, source / "model.safetensors")
    kept = ["config.json", "tokenizer.json", "modeling_x.py", "chat_template.jinja",
            "additional_chat_templates/rag.jinja", "router_balancing_biases.pt"]  # fmt: skip
    left = ["optimizer.pt", "rng_state.pth", "training_args.bin", "trainer_state.json",
            "pytorch_model.bin", ".gitattributes"]  # fmt: skip
    for name in (*kept, *left):
        (source / name).write_bytes(b"{}")
    out = tmp_path / "out"
    report = export_checkpoint(source, out, options=QUICK)
    made = {"README.md", "model.safetensors", "model.safetensors.index.json"}
    ours = {"milepost.json", "training/digests.bin"}
    assert set(report.files) == {*kept, *made, *ours}
    assert DirectoryCheckpoint(out).manifest.needs == ["router_balancing_biases.pt"]


def test_tensors_are_streamed_and_never_all_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tensors = {f"t{n}": torch.arange(24 * 2**20, dtype=torch.uint8) for n in range(3)}
    save_file(tensors, path)
    extra = peak_anon_nbytes(
        "from milepost.tools.export import export_checkpoint",
        "export_checkpoint(sys.argv[1], sys.argv[2])",
        path,
        tmp_path / "out",
    )
    assert extra < 24 * 2**20
    assert same(load_file(tmp_path / "out" / "model.safetensors"), tensors)


@pytest.mark.parametrize("target", list(ExportTarget))
def test_weights_without_the_sidecar_they_need_are_refused(
    tmp_path: Path, target: ExportTarget
) -> None:
    source = make_checkpoint(tmp_path, make_training())
    set_needs(source, "router_balancing_biases.pt")
    with pytest.raises(InvalidInputError, match=r"need router_balancing_biases\.pt"):
        export_checkpoint(source, tmp_path / "out" / "x.pt", to=target, options=QUICK)
    assert not (tmp_path / "out" / "x.pt").exists()


def test_nothing_that_is_there_is_replaced(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path, make_training())
    (tmp_path / "out").mkdir()
    with pytest.raises(ExistsError):
        export_checkpoint(source, tmp_path / "out")
    write_trio(tmp_path, ["best"], TrioContent(model_state={"w": torch.ones(1)}))
    for to in (ExportTarget.TRIO, ExportTarget.SINGLE_FILE):
        with pytest.raises(ExistsError):
            export_checkpoint(source, tmp_path / "best.pt", to=to)
    assert list(Checkpoint.open(tmp_path / "best").tensors()) == ["w"]


def test_a_pt_file_becomes_a_trio_of_its_own_name_and_stays(tmp_path: Path) -> None:
    torch.save({"model_state": {"w": torch.ones(2)}, "epoch": 4}, tmp_path / "x.pt")
    export_checkpoint(tmp_path / "x.pt", tmp_path / "x", to=ExportTarget.TRIO)
    assert (tmp_path / "x.pt").exists()
    assert Checkpoint.open(tmp_path / "x").info.epoch == 4


def test_damage_in_what_is_exported_is_refused_and_damage_elsewhere_is_not(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path, make_training())
    moments = source / "training" / "optimizer.safetensors"
    raw = bytearray(moments.read_bytes())
    raw[-1] ^= 1
    moments.write_bytes(bytes(raw))
    export_checkpoint(source, tmp_path / "weights", options=QUICK)
    with pytest.raises(DamagedError, match=r"optimizer\.safetensors"):
        export_checkpoint(source, tmp_path / "all", training_state=TrainingState.INCLUDE)
    weights = source / "model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(bytes(raw))
    with pytest.raises(DamagedError, match=r"are not\s+those that were saved"):
        export_checkpoint(source, tmp_path / "again", options=QUICK)
    assert not (tmp_path / "again").exists()


def test_an_export_that_fails_at_any_operation_leaves_nothing(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path, make_training())
    seen: list[str] = []

    def record(operation: str, target: str, function: Any, arguments: tuple[Any, ...]) -> Any:
        seen.append(operation)
        return function(*arguments)

    place = tmp_path / "place"
    place.mkdir()
    options = WriteOptions(durability=Durability.PAGE_CACHE, threads=1)
    with fileops.hooked(record):
        export_checkpoint(source, place / "out0", options=options)
    last_rename = len(seen) - 1 - seen[::-1].index("rename")
    for fail_at in range(last_rename + 1):
        count = iter(range(10**6))

        def fail(
            operation: str, target: str, function: Any, arguments: tuple[Any, ...],
            count: Any = count, fail_at: int = fail_at,
        ) -> Any:  # fmt: skip
            if next(count) == fail_at:
                raise OSError(5, "Input/output error", target)
            return function(*arguments)

        out = place / "out"
        with fileops.hooked(fail), pytest.raises((StorageError, OSError)):
            export_checkpoint(source, out, options=options)
        assert not out.exists(), (fail_at, seen[fail_at])
    export_checkpoint(source, out, options=options)
    assert sorted(path.name for path in place.iterdir()) == ["out", "out0"]


def test_the_training_state_of_a_trio_cannot_become_that_of_a_directory(tmp_path: Path) -> None:
    write_trio(tmp_path, ["best"], TrioContent(model_state={"w": torch.ones(1)}))
    with pytest.raises(InvalidInputError, match="by position alone"):
        export_checkpoint(tmp_path / "best", tmp_path / "out", training_state=TrainingState.INCLUDE)
