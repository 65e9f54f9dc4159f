"""Every dialect of a `.pt` that exists in the world, read into one set of names."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from milepost.checkpointing import load_checkpoint
from milepost.errors import (
    CheckpointWarning,
    FormatError,
    UnsafePickleError,
    UnsupportedVersionError,
)
from milepost.format.lazy import LazyTensor
from milepost.layouts.checkpoint import Checkpoint, Layout
from milepost.layouts.legacy import number, read_payload
from milepost.layouts.payload import Dialect, Payload
from milepost.layouts.single_file import SingleFileCheckpoint
from milepost.layouts.trio import TrioCheckpoint
from milepost.layouts.trio_migrations import STEPS, migrate

GOLDEN = Path(__file__).parent.parent / "golden"
WEIGHTS = {
    "0.weight": torch.arange(6.0).view(3, 2),
    "1.weight": torch.arange(6.0).view(3, 2) + 10,
    "1.bias": torch.arange(3.0) + 20,
}


def golden(name: str) -> Payload:
    return SingleFileCheckpoint(GOLDEN / name).payload()


def assert_weights(payload: Payload) -> None:
    assert set(payload.model_state) == set(WEIGHTS)
    for name, expected in WEIGHTS.items():
        assert torch.equal(payload.model_state[name], expected)


@pytest.mark.case("C5.26")
@pytest.mark.parametrize(
    ("name", "dialect"),
    [
        ("legacy_2025_07.pt", Dialect.LLM),
        ("legacy_v005.pt", Dialect.LLM),
        ("legacy_compiled.pt", Dialect.LLM),
        ("demo_step_200.pt", Dialect.LLM_DEMO),
        ("draft.pt", Dialect.LLM_DRAFT),
        ("modern_llm.pt", Dialect.MODERN_LLM),
        ("modern_llm_oldest.pt", Dialect.MODERN_LLM_OLDEST),
        ("modern_llm_fork.pt", Dialect.MODERN_LLM),
        ("state_dict.pt", Dialect.STATE_DICT),
    ],
)
def test_each_dialect_is_recognised_and_gives_its_weights(name: str, dialect: Dialect) -> None:
    checkpoint = Checkpoint.open(GOLDEN / name)
    assert isinstance(checkpoint, SingleFileCheckpoint)
    assert checkpoint.dialect is dialect
    assert checkpoint.info.dialect == dialect
    assert_weights(checkpoint.payload())
    assert set(checkpoint.tensors()) == set(WEIGHTS)
    assert torch.equal(checkpoint.read("1.weight", [slice(1, 3)]), WEIGHTS["1.weight"][1:])
    is_ours = dialect is Dialect.MODERN_LLM
    assert checkpoint.layout is (Layout.SINGLE_FILE if is_ours else Layout.LEGACY)


def test_the_last_one_file_generation_has_all_its_states() -> None:
    payload = golden("legacy_v005.pt")
    assert (payload.epoch, payload.loss, payload.best_loss) == (3, 0.5, 0.25)
    assert payload.model_config["hidden_size"] == 2
    assert payload.scheduler_state["last_epoch"] == 3
    assert payload.extra_state == {"global_step": 400}
    assert payload.scaler_state is None
    assert payload.format_version == "1.0"
    assert payload.optimizer_state["param_groups"][0]["lr"] == 0.125


def test_the_first_generation_has_the_defaults_of_what_it_did_not_record() -> None:
    payload = golden("legacy_2025_07.pt")
    assert payload.model_config is None
    assert payload.extra_state is None
    assert payload.scaler_state["scale"] == 65536.0
    assert {"model_config", "extra_state"} <= payload.defaulted
    assert "epoch" not in payload.defaulted


def test_a_compiled_model_has_plain_names_and_its_stored_ones_are_known() -> None:
    payload = golden("legacy_compiled.pt")
    assert payload.stored_names["0.weight"] == "_orig_mod.0.weight"


def test_the_demo_script_gives_its_step_and_configuration() -> None:
    payload = golden("demo_step_200.pt")
    assert (payload.epoch, payload.step) == (1, 200)
    assert payload.model_config == {"hidden_size": 2, "lr": 0.125}
    assert payload.optimizer_state["param_groups"]


def test_modern_llm_gives_its_metadata() -> None:
    payload = golden("modern_llm.pt")
    assert (payload.step, payload.loss) == (1000, 2.5)
    assert payload.metadata["run_name"] == "tiny"
    assert payload.metrics == {"loss": 2.5}
    assert golden("modern_llm_oldest.pt").metadata == payload.metadata


def test_the_fork_gives_its_quantization() -> None:
    assert golden("modern_llm_fork.pt").quantization["config"] == {"mode": "bitnet_b1_58"}


@pytest.mark.parametrize("stem", ["trio_v2_unstamped", "trio_v2_stamped"])
def test_a_split_checkpoint_of_the_older_program_is_read(stem: str) -> None:
    checkpoint = Checkpoint.open(GOLDEN / stem)
    assert isinstance(checkpoint, TrioCheckpoint)
    payload = checkpoint.payload()
    assert_weights(payload)
    assert (payload.epoch, payload.format_version, payload.loss) == (3, "2.0", 0.5)
    assert payload.scheduler_state["last_epoch"] == 3
    assert payload.extra_state["stream_data"]["shards"]["0"]["line_index"] == 7
    assert payload.best_loss == (math.inf if "un" in stem else 0.25)
    report = checkpoint.verify()
    assert report.ok and not report.has_digests


def test_each_step_of_the_migrations_has_a_golden_file() -> None:
    assert set(STEPS) == {"1.0"}
    payload = golden("legacy_v005.pt")
    document = migrate({"model_state": {}, "epoch": 3}, where="x.pt", version="1.0")
    assert payload.format_version == "1.0"
    assert document == {
        "model_state": {},
        "epoch": 3,
        "loss": None,
        "best_loss": math.inf,
        "model_config": None,
        "optimizer_state": None,
        "scheduler_state": None,
        "scaler_state": None,
        "extra_state": None,
        "format_version": "2.0",
    }


@pytest.mark.case("C1.8")
def test_a_newer_major_version_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedVersionError, match=r"x\.json: written in format version 3\.0"):
        migrate({"format_version": "3.0"}, where="x.json")


@pytest.mark.parametrize("version", [2, "two", "2", None, "1.5"])
def test_what_is_no_version_is_refused(version: Any) -> None:
    with pytest.raises(FormatError, match="format_version"):
        migrate({"format_version": version}, where="x.json")


def test_a_newer_minor_version_is_read() -> None:
    assert migrate({"format_version": "2.7"}, where="x.json")["format_version"] == "2.7"


@pytest.mark.case("C5.26")
@pytest.mark.parametrize("tree", [[1, 2], "text", torch.zeros(2), None, 3, {}, {"a": 1}])
def test_what_is_no_training_checkpoint_is_refused(tree: Any, tmp_path: Path) -> None:
    torch.save(tree, tmp_path / "x.pt")
    with pytest.raises(FormatError, match=r"x\.pt"):
        load_checkpoint(tmp_path / "x.pt")


def test_weights_that_are_no_state_dict_are_refused() -> None:
    with pytest.raises(FormatError, match="model_state is a int"):
        read_payload({"model_state": 3}, where="x.pt")


@pytest.mark.case("C5.26")
def test_a_missing_epoch_has_a_default() -> None:
    payload = read_payload({"model_state_dict": {}, "optimizer_state_dict": {}}, where="x.pt")
    assert (payload.epoch, payload.loss, payload.best_loss) == (0, None, math.inf)
    assert {"epoch", "loss", "best_loss"} <= payload.defaulted


@pytest.mark.case("C7.33")
def test_an_optimizer_named_in_metadata_is_no_optimizer_state(tmp_path: Path) -> None:
    metadata = {"optimizer": "adamw", "step": 1}
    torch.save({"model_state": {}, "metadata": metadata, **metadata}, tmp_path / "x.pt")
    assert SingleFileCheckpoint(tmp_path / "x.pt").payload().optimizer_state is None
    result = load_checkpoint(tmp_path / "x.pt")
    assert "optimizer" not in result
    assert result["metadata"]["optimizer"] == "adamw"


@pytest.mark.case("C7.33")
def test_metadata_that_disagrees_with_its_copy_is_reported(tmp_path: Path) -> None:
    tree = {"model_state": {}, "metadata": {"step": 7, "loss": math.nan}, "step": 5}
    torch.save(tree | {"loss": math.nan}, tmp_path / "x.pt")
    assert SingleFileCheckpoint(tmp_path / "x.pt").payload().conflicts == {"step": (5, 7)}
    with pytest.warns(CheckpointWarning, match="step is 5 at the top and 7 in metadata") as caught:
        assert load_checkpoint(tmp_path / "x.pt")["step"] == 7
    assert len(caught) == 1


@pytest.mark.case("C7.32")
def test_two_names_that_become_one_are_refused() -> None:
    tree = {"model_state": {"_orig_mod.a": 1, "a": 2}, "epoch": 1}
    with pytest.raises(FormatError, match=r"_orig_mod\.a and a both become a"):
        read_payload(tree, where="x.pt")


@pytest.mark.case("C7.32")
def test_nested_compile_segments_are_taken_off() -> None:
    tree = {"model_state": {"blocks.0._orig_mod.w": 1, "module.x": 2}, "epoch": 1}
    payload = read_payload(tree, where="x.pt")
    assert dict(payload.model_state) == {"blocks.0.w": 1, "module.x": 2}


class MoEConfig:
    def __init__(self) -> None:
        self.num_experts = 4


@pytest.mark.case("C7.31")
def test_an_object_in_the_metadata_is_read_as_data_when_allowed(tmp_path: Path) -> None:
    config = {"d_model": 2, "moe_config": MoEConfig()}
    torch.save(
        {"model_state": {"w": torch.ones(1)}, "metadata": {"config": config}}, tmp_path / "x.pt"
    )
    name = f"{MoEConfig.__module__}.MoEConfig"
    with pytest.raises(UnsafePickleError, match="MoEConfig") as caught:
        load_checkpoint(tmp_path / "x.pt")
    assert caught.value.global_name == name
    result = load_checkpoint(tmp_path / "x.pt", allow=[name])
    assert result["config"] == {"d_model": 2, "moe_config": {"num_experts": 4}}


class Malicious:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


@pytest.mark.case("C6.28")
def test_a_pickle_that_would_run_code_is_refused_and_runs_nothing(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    torch.save({"model_state": {}, "x": Malicious(marker)}, tmp_path / "x.pt")
    with pytest.raises(UnsafePickleError):
        load_checkpoint(tmp_path / "x.pt")
    assert not marker.exists()


@pytest.mark.case("C6.28")
def test_a_whole_module_is_refused(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(2, 2), tmp_path / "x.pt")
    with pytest.raises(UnsafePickleError, match="Linear"):
        load_checkpoint(tmp_path / "x.pt")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (3, 3.0),
        (torch.tensor(0.5), 0.5),
        ("tensor(0.5000, device='cuda:0')", 0.5),
        ("tensor(0.2500)", 0.25),
        (True, None),
        ("high", None),
        (None, None),
        (torch.zeros(2), None),
    ],
)
def test_a_loss_is_read_from_what_older_programs_wrote(value: Any, expected: float | None) -> None:
    assert number(value) == expected


def test_opening_reads_no_tensor(tmp_path: Path) -> None:
    shutil.copy(GOLDEN / "legacy_v005.pt", tmp_path / "x.pt")
    checkpoint = SingleFileCheckpoint(tmp_path / "x.pt")
    assert all(isinstance(t, LazyTensor) for t in checkpoint._lazy.values())
    assert checkpoint.state_tensors()["optimizer_state.state.0.exp_avg"].shape == (3, 2)
