"""The Hugging Face Trainer with Milepost: a run that is killed, and one that goes on from it.

    python examples/hf_trainer.py --run runs/hf --steps 20 --kill-at 13
    python examples/hf_trainer.py --run runs/hf --steps 20

The second call goes on from the newest checkpoint, and ends with the bits of a run that was never
killed: the last line is a digest of the weights. A tiny random Llama on random tokens, on the CPU.
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path
from typing import Any

import torch
import transformers

import milepost as mp
from milepost.integrations.transformers import MilepostTrainerMixin


class Trainer(MilepostTrainerMixin, transformers.Trainer):
    """All there is to do."""


class Kill(transformers.TrainerCallback):
    """Ends the process in the middle of training."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise SystemExit(f"killed at step {self.step}")


def tiny_model() -> Any:
    transformers.set_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64}
    config = transformers.LlamaConfig(**sizes, **heads, attention_dropout=0.1)
    return transformers.LlamaForCausalLM(config)


def tokens() -> list[dict[str, torch.Tensor]]:
    rows = torch.randint(0, 64, (64, 16), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in rows]


def digest(model: torch.nn.Module) -> str:
    hasher = hashlib.sha256()
    for _, tensor in sorted(model.state_dict().items()):
        hasher.update(tensor.contiguous().numpy().tobytes())
    return hasher.hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, default=Path("runs/hf"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--kill-at", type=int, default=0)
    options = parser.parse_args()
    args = transformers.TrainingArguments(
        output_dir=str(options.run),
        max_steps=options.steps,
        save_steps=5,
        save_total_limit=2,
        logging_steps=5,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=tiny_model(), args=args, train_dataset=tokens(), callbacks=[Kill(options.kill_at)]
    )
    newest = mp.newest(options.run)
    if newest is not None:
        print(f"going on from {newest.name}")
    trainer.train(resume_from_checkpoint=newest is not None)
    print(f"weights {digest(trainer.model)}")


if __name__ == "__main__":
    main()
