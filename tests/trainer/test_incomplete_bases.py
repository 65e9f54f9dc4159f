"""A base that lacks a tensor is refused on every mesh: it would be trained from noise."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from milepost_trainer.config import parse_config
from milepost_trainer.training import Run
from tests.marks import slow
from tests.trainer.lora_runs import LORA, BaseOf, on_base
from tests.trainer.yaml_runs import config_of, ranks_of, yaml_of
from tests.worlds import run_outcomes

LOST = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def incomplete(base_of: BaseOf, tmp_path: Path) -> Path:
    base = tmp_path / "incomplete"
    shutil.copytree(base_of("llama-plain"), base)
    file = base / "model.safetensors"
    held = load_file(file)
    del held[LOST]
    save_file(held, file, {"format": "pt"})
    return base


def _start(rank: int, world_size: int, document: str) -> None:
    Run(parse_config(document, "run.yaml"))


@pytest.mark.parametrize(
    ("mesh", "lora"),
    [("", None), ("dp_shard2", None), ("tp2", LORA), *map(slow, ("cp2", "pp2"), (None, None))],
)
def test_a_base_that_lacks_a_layer_is_refused_and_the_tensor_named(
    mesh: str, lora: object, incomplete: Path, text: Path, tmp_path: Path
) -> None:
    more = {} if lora is None else {"lora": lora}
    pieces = {"microbatches": 2} if "pp" in mesh else {}
    document = yaml_of(tmp_path / "run", text, mesh, **on_base(incomplete, **more, **pieces))
    for outcome in run_outcomes(ranks_of(mesh), _start, document):
        assert outcome.error_class == "ConfigError"
        assert outcome.error is not None and LOST in outcome.error
        assert "has no values for 1 tensors of the model" in outcome.error


@pytest.mark.parametrize("task", ["reward", "embedding"])
def test_a_new_head_is_no_gap_in_the_base(
    task: str, base_of: BaseOf, samples: dict[str, Path], tmp_path: Path
) -> None:
    start = on_base(base_of("llama-plain"), task=task)
    assert Run(config_of(tmp_path / "run", samples[task], **start)).model is not None
