"""Make the golden files of what this version writes: a trio and a single file.

    python tests/golden/make_current.py

They stay as they are: a later version must read them. A new form gets new names.
"""

from __future__ import annotations

from pathlib import Path

import torch

import milepost as mp
from milepost.layouts.trio import TrioContent, write_trio
from milepost.storage.lease import LOCK_NAME

HERE = Path(__file__).parent


def weights() -> dict[str, torch.Tensor]:
    return {
        "embed.weight": torch.arange(12, dtype=torch.float32).reshape(4, 3),
        "head.bias": torch.tensor([0.5, -0.25]).to(torch.bfloat16),
    }


def moments() -> dict[str, object]:
    return {
        "state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.full((4, 3), 0.125)}},
        "param_groups": [{"lr": 0.001, "betas": (0.9, 0.95), "params": [0, 1]}],
    }


def main() -> None:
    mp.save_checkpoint(
        HERE / "single_file_v1.pt",
        model_state=weights(),
        optimizer_state=moments(),
        step=3,
        config={"hidden_size": 3},
    )
    content = TrioContent(
        model_state=weights(),
        optimizer_state=moments(),
        scheduler_state={"last_epoch": 3},
        extra_state={"seen": [1, 2]},
        epoch=2,
        loss=1.5,
        best_loss=1.25,
        model_config={"hidden_size": 3},
    )
    write_trio(HERE, ["trio_v2_milepost"], content)
    (HERE / LOCK_NAME).unlink()


if __name__ == "__main__":
    main()
