"""Makes the files of this directory with plain torch and safetensors, as older programs wrote them.

Run it only to add a file: those that are here stand for files that exist in the world.
    python tests/golden/make_golden.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

HERE = Path(__file__).parent
CONFIG = {"hidden_size": 2, "num_heads": 1, "num_layers": 1, "vocab_size": 3, "use_glu": False}
MODERN_CONFIG = {"vocab_size": 3, "d_model": 2, "n_layers": 1, "n_heads": 1, "moe_config": None}


def model() -> nn.Module:
    module = nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 3))
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            parameter.copy_(torch.arange(parameter.numel()).view_as(parameter) + 10 * number)
    return module


def weights(prefix: str = "") -> dict[str, Tensor]:
    return {prefix + name: tensor for name, tensor in model().state_dict().items()}


def optimizer_state() -> dict[str, Any]:
    module = model()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.125)
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    optimizer.step()
    return optimizer.state_dict()


def scheduler_state() -> dict[str, Any]:
    return {"last_epoch": 3, "_step_count": 4, "base_lrs": [0.125], "_last_lr": [0.125]}


def write_pt(name: str, payload: Any) -> None:
    if not (HERE / name).exists():
        torch.save(payload, HERE / name)


def write_trio(stem: str, stamps: dict[str, Any], **meta: Any) -> None:
    if (HERE / f"{stem}.meta.json").exists():
        return
    header = {key: str(value) for key, value in stamps.items()}
    save_file(weights(), HERE / f"{stem}.safetensors", metadata=header or None)
    document = {"format_version": "2.0", "model_config": CONFIG, **meta, **stamps}
    text = json.dumps(document, indent=2, sort_keys=True, default=str)
    (HERE / f"{stem}.meta.json").write_text(text, encoding="utf-8")
    state = {
        "optimizer_state": optimizer_state(),
        "scheduler_state": scheduler_state(),
        "scaler_state": None,
        "extra_state": {"stream_data": {"shards": {"0": {"line_index": 7, "token_buffer": [1]}}}},
    }
    torch.save(state | stamps, HERE / f"{stem}.extra_state.pt")


def write_llm() -> None:
    state = {"optimizer_state": optimizer_state(), "scheduler_state": scheduler_state()}
    common = {"epoch": 3, "loss": 0.5, "best_loss": 0.25, **state, "scaler_state": None}
    first = {**common, "scaler_state": {"scale": 65536.0, "growth_factor": 2.0}}
    write_pt("legacy_2025_07.pt", {**first, "model_state": weights()})
    later = {**common, "model_config": CONFIG, "extra_state": {"global_step": 400}}
    write_pt("legacy_v005.pt", {**later, "model_state": weights()})
    write_pt("legacy_compiled.pt", {**common, "model_state": weights("_orig_mod.")})
    demo = {"epoch": 1, "global_step": 200, "loss": 0.5, "config": {"hidden_size": 2, "lr": 0.125}}
    write_pt(
        "demo_step_200.pt",
        {"model_state_dict": weights(), "optimizer_state_dict": optimizer_state(), **demo},
    )
    write_pt("draft.pt", {"model": weights(), "optimizer": optimizer_state(), "epoch": 1})
    write_trio("trio_v2_unstamped", {}, epoch=3, loss=0.5, best_loss=float("inf"))
    stamps = {"save_id": "0123456789abcdef0123456789abcdef", "epoch": 3}
    write_trio("trio_v2_stamped", stamps, loss=torch.tensor(0.5), best_loss=0.25)


def write_modern() -> None:
    metadata = {"step": 1000, "loss": 2.5, "run_name": "tiny", "config": MODERN_CONFIG}
    state = {"model_state": weights(), "optimizer": optimizer_state()}
    write_pt("modern_llm.pt", {**state, "metadata": metadata, **metadata})
    oldest = {"model": weights(), "optimizer": optimizer_state(), "metadata": metadata}
    write_pt("modern_llm_oldest.pt", oldest)
    quantization = {"config": {"mode": "bitnet_b1_58"}, "summary": {"layers": 1}}
    fork = {**metadata, "quantization": quantization}
    write_pt("modern_llm_fork.pt", {"model_state": weights(), "metadata": fork, **fork})
    write_pt("state_dict.pt", weights())


if __name__ == "__main__":
    write_llm()
    write_modern()
    sys.exit(0)
