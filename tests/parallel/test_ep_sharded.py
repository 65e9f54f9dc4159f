"""One file of experts for each rank: the layout, what is refused, and who refuses to read it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen3MoeConfig,
)

import milepost as mp
from milepost.checkpointing.copies import Copies
from milepost.checkpointing.ep_sharded import MergeOnSave
from milepost.errors import FormatError, InvalidInputError
from milepost.hf.ep_families import supported_ep_merge_model_types
from tests.parallel.models import whole
from tests.worlds import run_world

_COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "qwen3_moe": Qwen3MoeConfig(num_experts=8, moe_intermediate_size=16, **_COMMON),
    "mixtral": MixtralConfig(num_local_experts=8, **_COMMON),
    "gpt_oss": GptOssConfig(num_local_experts=8, layer_types=["full_attention"] * 2, **_COMMON),
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for name, config in CONFIGS.items():
        torch.manual_seed(0)
        found[name] = tmp_path_factory.mktemp(name)
        AutoModelForCausalLM.from_config(config).save_pretrained(found[name])
    return found


def build(base: Path, **sizes: int) -> Any:
    from transformers.distributed import DistributedConfig

    return AutoModelForCausalLM.from_pretrained(base, distributed_config=DistributedConfig(**sizes))


def write(rank: int, size: int, base: Path, run: Path) -> dict[str, torch.Tensor]:
    model = build(base, tp_size=size, ep_size=size)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.arange(8)[None]
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer}
    mp.save_sharded_ep(run / "checkpoint-1", state, step=1, max_shard_size=1)
    return {name: whole(param) for name, param in model.named_parameters()}


def parts_of(path: Path) -> list[dict[str, torch.Tensor]]:
    found = []
    for part in sorted(path.glob("model-*.safetensors")):
        with safe_open(part, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            found.append({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    return found


@pytest.mark.spec("v1#slices-1", "v1#slices-2")
@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("size", [2, 4])
def test_slices_in_order_of_rank_are_the_tensors_in_memory(
    family: str, size: int, bases: dict[str, Path], tmp_path: Path
) -> None:
    gathered = run_world(size, write, bases[family], tmp_path)[0]
    path = tmp_path / "checkpoint-1"
    names = [f"model-{rank:05d}-of-{size:05d}.safetensors" for rank in range(size)]
    assert [p.name for p in sorted(path.glob("*.safetensors"))] == names
    parts = parts_of(path)
    index = json.loads((path / "model.safetensors.index.json").read_bytes())
    experts = {name for name in gathered if ".experts." in name}
    assert experts
    for name, tensor in gathered.items():
        if name in experts:
            slices = [parts[rank][f"{name}.shard_{rank}"] for rank in range(size)]
            assert torch.equal(torch.cat(slices), tensor), name
        else:
            assert torch.equal(parts[0][name], tensor), name
    assert all(".shard_" in name for part in parts[1:] for name in part)
    total = sum(t.nbytes for part in parts for t in part.values())
    assert index["metadata"] == {"total_size": total, "ep_size": size, "format": "ep_sharded"}
    assert index["weight_map"] == {n: names[r] for r, part in enumerate(parts) for n in part}
    checkpoint = mp.Checkpoint.open(path)
    assert checkpoint.verify().problems == ()
    manifest = json.loads((path / "milepost.json").read_bytes())
    assert manifest["models"]["model"]["huggingface"] is False
    assert manifest["fingerprint"]["ep_size"] == size
    config = AutoModelForCausalLM.from_pretrained(bases[family]).config
    with pytest.raises(FormatError, match="milepost merge-ep-shards"):
        mp.load(path, {"model": AutoModelForCausalLM.from_config(config)})
    with pytest.raises(FormatError, match="milepost merge-ep-shards"):
        checkpoint.read_weights()


@pytest.mark.spec("v1#index-4")
def test_slices_without_an_index_are_known_by_their_names(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    run_world(2, write, bases["mixtral"], tmp_path)
    path = tmp_path / "checkpoint-1"
    for name in ("milepost.json", "model.safetensors.index.json"):
        (path / name).unlink()
    with pytest.raises(FormatError, match="milepost merge-ep-shards"):
        mp.Checkpoint.open(path).tensors()


@pytest.mark.spec("v1#index-4")
def test_a_stale_whole_file_beside_slices_is_not_taken_for_the_model(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    run_world(2, write, bases["mixtral"], tmp_path)
    path = tmp_path / "checkpoint-1"
    (path / "milepost.json").unlink()
    (path / "model.safetensors").write_bytes((bases["mixtral"] / "model.safetensors").read_bytes())
    with pytest.raises(FormatError, match="milepost merge-ep-shards"):
        mp.Checkpoint.open(path).tensors()


# ---- refusals


class Experts(nn.Module):
    """The experts of one layer, held as `placements` say."""

    def __init__(self, mesh: Any, placements: list[Placement]) -> None:
        super().__init__()
        whole_tensor = torch.arange(64.0).reshape(4, 4, 4)
        self.gate_up_proj = nn.Parameter(distribute_tensor(whole_tensor, mesh, placements))


class Layered(nn.Module):
    """A model with one layer of experts, or none."""

    def __init__(self, kind: str, experts: nn.Module | None) -> None:
        super().__init__()
        self.config = CONFIGS.get(kind) or Qwen3MoeConfig(**_COMMON)
        if kind not in CONFIGS:
            self.config.model_type = kind
        self.router = nn.Linear(2, 2)
        if experts is not None:
            self.experts = experts


class UlyssesAttention(nn.Module):
    pass


def reason(function: Any, *args: Any, **options: Any) -> str:
    try:
        function(*args, **options)
    except InvalidInputError as error:
        return str(error)
    return "accepted"


def refusals(rank: int, size: int, run: Path) -> dict[str, str]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    both = init_device_mesh("cpu", (1, 2), mesh_dim_names=("ep", "expert_tp"))
    lone = init_device_mesh("cpu", (2, 1), mesh_dim_names=("efsdp", "ep"))

    def model(kind: str = "qwen3_moe") -> Any:
        return Layered(kind, Experts(mesh, [Shard(0)]))

    def asked(live: Any, **options: Any) -> str:
        return reason(mp.validate_ep_sharded_save, live, world_size=size, **options)

    adapted = model()
    adapted.experts.register_parameter("gate_up_proj_lora", None)
    adapted.experts.adapter = nn.ParameterDict({"lora_A": nn.Parameter(torch.ones(2))})
    under_cp = model()
    under_cp.attention = UlyssesAttention()
    peft = type("PeftModel", (Layered,), {})("qwen3_moe", Experts(mesh, [Shard(0)]))
    several = Layered("qwen3_moe", Experts(lone, [Replicate(), Shard(0)]))
    found = {
        "fine": asked(model()),
        "merge-on-save": asked(model(), merge=MergeOnSave.EXPERT_LORA),
        "no-experts": asked(Layered("qwen3_moe", None)),
        "whole-experts": asked(Layered("qwen3_moe", Experts(mesh, [Replicate()]))),
        "ulysses": asked(under_cp),
        "cp-stated": asked(model(), fingerprint={"cp_size": 2}),
        "expert-lora": asked(adapted),
        "peft": asked(peft),
        "unknown-type": asked(model("made_up")),
        "hub-namespace": asked(model("step3p7")),
        "etp": asked(Layered("qwen3_moe", Experts(both, [Shard(0), Shard(2)]))),
        "several-groups": asked(several),
        "pipeline": asked(model(), fingerprint={"pp_size": 2}),
        "per-node": asked(model(), copies=Copies.PER_NODE),
        "at-save": reason(
            mp.save_sharded_ep, run / "checkpoint-1", {"model": model("made_up")}, step=1
        ),
        "at-save-merge": reason(
            mp.save_sharded_ep,
            run / "checkpoint-1",
            {"model": model()},
            step=1,
            merge=MergeOnSave.EXPERT_LORA,
        ),
    }
    stage = model()
    stage.register_parameter(f"only_{rank}", nn.Parameter(torch.ones(1)))
    found["stages"] = reason(mp.save_sharded_ep, run / "checkpoint-1", {"model": stage}, step=1)
    assert isinstance(several.experts.gate_up_proj, DTensor)
    return found


EXPECTED = {
    "fine": "accepted",
    "merge-on-save": "merged on save",
    "no-experts": "no layer whose experts are divided",
    "whole-experts": "no layer whose experts are divided",
    "ulysses": "context parallelism",
    "cp-stated": "context parallelism",
    "expert-lora": "native adapters on its experts",
    "peft": "PeftModel",
    "unknown-type": "'made_up' is none of those",
    "hub-namespace": "namespace of its own",
    "etp": "cut inside",
    "several-groups": "spans 1 of 2 ranks",
    "pipeline": "pipeline of 2 stages",
    "per-node": "output disk of its own",
    "at-save": "'made_up' is none of those",
    "at-save-merge": "merged on save",
    "stages": "stages of a pipeline",
}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    run = tmp_path_factory.mktemp("refused")
    found = run_world(2, refusals, run)
    assert list(run.iterdir()) == []
    return found


@pytest.mark.parametrize("row", EXPECTED)
def test_what_slices_cannot_express_is_refused_on_every_rank(
    row: str, told: list[dict[str, str]]
) -> None:
    for found in told:
        assert EXPECTED[row] in found[row]
        assert row == "fine" or "nothing" in found[row] or "use save" in found[row]


def two_groups(rank: int, size: int, base: Path) -> str:
    model = build(base, fsdp_size=4, ep_size=2)
    return reason(mp.validate_ep_sharded_save, model, world_size=size)


def test_several_groups_of_experts_are_refused(bases: dict[str, Path]) -> None:
    for found in run_world(4, two_groups, bases["qwen3_moe"]):
        assert "spans 2 of 4 ranks" in found


def test_the_families_are_data_and_name_what_they_support() -> None:
    assert {"qwen3_moe", "mixtral", "gpt_oss"} <= set(supported_ep_merge_model_types())
    assert "step3p7" not in supported_ep_merge_model_types()
