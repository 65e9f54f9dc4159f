"""No method holds a whole tensor, however many times it reads it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.tools.rewrite.memory import peak_anon_nbytes

MIB = 2**20
IMPORTS = """
from pathlib import Path
from milepost.tools.merge_models import Tokenizers, merge_models
from tests.tools.merge_models.merging import FAST, command
"""
RUN = """
place, method = Path(sys.argv[1]), sys.argv[2]
paths = [place / str(number) for number in range(3)]
free = ("linear", "nuslerp", "multislerp", "karcher", "passthrough")
base = None if method in free else paths[0]
models = {"nuslerp": paths[:2], "passthrough": paths[:1]}.get(method, paths[1:])
knobs = {"select_topk": 0.5} if method == "sce" else {}
if method.startswith(("dare", "della", "breadcrumbs")):
    knobs = {"density": 0.5}
recipe = command(models, method=method, base=base, knobs=knobs)
merge_models(recipe, place / method, tokenizers=Tokenizers.ALLOW_MISSING, options=FAST)
"""
# slerp, ties, dare_ties and della: see test_merge_models.py
METHODS = [
    "linear", "nuslerp", "multislerp", "karcher", "task_arithmetic", "model_stock", "dare_linear",
    "della_linear", "breadcrumbs", "breadcrumbs_ties", "sce", "passthrough",
]  # fmt: skip


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three models of one tensor of 64 MiB."""
    place = tmp_path_factory.mktemp("large")
    values = torch.randn(2**14, 2**11, generator=torch.Generator().manual_seed(0)).mul_(0.02)
    for number in range(3):
        (place / str(number)).mkdir()
        (place / str(number) / "config.json").write_text('{"model_type": "llama"}')
        drifted = values.add(values.roll(number, 1), alpha=0.1 * number).bfloat16()
        save_file({"lm_head.weight": drifted}, place / str(number) / "model.safetensors")
    return place


@pytest.mark.parametrize("method", METHODS)
def test_no_tensor_is_whole_in_memory(
    method: str, large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    peak = peak_anon_nbytes(IMPORTS, RUN, large, method)
    assert peak < 40 * MIB, f"{peak / MIB:.1f} MiB with a tensor of 64 MiB in three models"
