"""The thirteen fields of the topology, as they are derived for real modes; and the files of stages
that hold experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import milepost as mp
from milepost.format.fingerprint import FIELDS
from tests.trainer.modes import MOE, Mode, alone, mode, start
from tests.worlds import run_world

PLAIN: dict[str, Any] = {
    "ep_size": 1,
    "expert_tp_size": 1,
    "cp_size": 1,
    "tp_size": 1,
    "pp_size": 1,
    "optimizer_class": "AdamW",
    "ep_scope": None,
    "nvlink_domain_size": None,
    "hsdp": False,
}
CASES: list[tuple[Mode, dict[str, Any]]] = [
    (mode("HSDP", dp_replicate=2, dp_shard=2), {"hsdp": True}),
    (mode("TP+CP", cp=2, tp=2), {"cp_size": 2, "tp_size": 2}),
    (mode("PP+FSDP2", pp=2, dp_shard=2), {"pp_size": 2}),
    (
        mode("FSDP2", MOE, dp_shard=2),
        {"fsdp_shard_ep1_experts": True, "expert_replica_size": 1},
    ),
    (mode("EP", MOE, dp_shard=2, ep=2), {"ep_size": 2, "fsdp_shard_ep1_experts": False}),
    (mode("ETP", MOE, dp_shard=2, etp=2), {"expert_tp_size": 2}),
    (mode("EP+ETP", MOE, dp_shard=4, ep=2, etp=2), {"ep_size": 2, "expert_tp_size": 2}),
    (
        mode("HSDP+EP", MOE, dp_replicate=2, dp_shard=2, ep=2),
        {"ep_size": 2, "expert_replica_size": 2, "hsdp": True},
    ),
    (mode("PP+EP", MOE, pp=2, dp_shard=2, ep=2), {"pp_size": 2, "ep_size": 2}),
]


def save_and_load(rank: int, world_size: int, held: Mode, run: Path) -> tuple[str, dict[str, Any]]:
    training = start(held)
    training.steps(1)
    mp.save(run / "checkpoint-1", training.state(), step=1)
    report = mp.load(run / "checkpoint-1", training.state())
    return report.level.value, report.fingerprint


def manifest_of(run: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((run / "checkpoint-1" / "milepost.json").read_bytes())
    return document


QUICK = ("HSDP", "ETP", "HSDP+EP")


def case(held: Mode, fields: dict[str, Any]) -> Any:
    marks = [] if held.name in QUICK else [pytest.mark.slow]
    return pytest.param(held, fields, id=str(held), marks=marks)


@pytest.mark.parametrize(("held", "fields"), [case(*each) for each in CASES])
def test_the_manifest_states_all_fields_as_the_mesh_has_them(
    held: Mode, fields: dict[str, Any], tmp_path: Path
) -> None:
    size = held.sizes.world_size
    assert run_world(size, save_and_load, held, tmp_path) == [("exact", {})] * size
    found = manifest_of(tmp_path)["fingerprint"]
    assert found.keys() == set(FIELDS) and found["world_size"] == size
    expected = {**PLAIN, **fields}
    assert {name: found[name] for name in expected} == expected


def elsewhere(rank: int, world_size: int, held: Mode, run: Path) -> dict[str, Any]:
    return mp.load(run / "checkpoint-1", start(held).state()).fingerprint


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two stages, each with its experts on two ranks."""
    run = tmp_path_factory.mktemp("staged")
    run_world(4, save_and_load, mode("PP+EP", MOE, pp=2, dp_shard=2, ep=2), run)
    return run


def test_every_field_that_another_mesh_changes_is_reported(staged: Path) -> None:
    (found,) = run_world(1, elsewhere, alone(MOE), staged)
    assert {"world_size": (4, 1), "pp_size": (2, 1), "ep_size": (2, 1)}.items() <= found.items()


def test_stages_are_chosen_before_experts_and_their_files_say_so(staged: Path) -> None:
    path = staged / "checkpoint-1"
    parts = {f"model-pp0000{stage}-of-00002-00001.safetensors" for stage in (0, 1)}
    assert {place.name for place in path.glob("*.safetensors")} == parts
    index = json.loads((path / "model.safetensors.index.json").read_bytes())
    assert set(index["metadata"]) == {"total_size"}
    of_stage: dict[str, set[str]] = {}
    for name, part in index["weight_map"].items():
        if ".experts." in name:
            of_stage.setdefault(part, set()).add(name.split(".")[2])
    assert of_stage == dict(zip(sorted(parts), ({"0", "1"}, {"2", "3"}), strict=True))
    assert manifest_of(staged)["pp_stage_partition"] == {"model": [[0, 2], [2, 4]]}
