"""Train a small byte-level decoder on the CPU with one `.pt` per checkpoint; resumes by itself.

    python examples/train_decoder.py --run runs/decoder --steps 60

Run it again with more steps, or after stopping it, and it goes on where the latest checkpoint is.
The text is Python's own language reference. In the run directory lie `latest_checkpoint.pt`,
`best.pt` (lowest loss on held-out text), the last few `step_N.pt`, and `decoder_final.pt`.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu

import milepost as mp

BATCH = 8


@dataclass(frozen=True)
class DecoderConfig:
    vocab_size: int = 256
    width: int = 64
    layers: int = 2
    heads: int = 4
    context: int = 64


class Block(nn.Module):
    """Causal attention and a feed-forward, each behind an RMSNorm and added to its input."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.attention_norm = nn.RMSNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)
        self.mlp_norm = nn.RMSNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width, bias=False)
        self.down = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        qkv = self.qkv(self.attention_norm(hidden)).unflatten(-1, (3, self.heads, -1))
        query, key, value = (each.transpose(1, 2) for each in qkv.unbind(2))
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).flatten(2))
        added: Tensor = self.down(silu(self.up(self.mlp_norm(hidden))))
        return hidden + added


class Decoder(nn.Module):
    """Byte and position embeddings, blocks, and a head tied to the byte embedding."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.bytes = nn.Embedding(config.vocab_size, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        for embedding in (self.bytes, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)
        self.head.weight = self.bytes.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.bytes(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits

    def loss(self, ids: Tensor) -> Tensor:
        """Mean cross-entropy of each byte given those before it, in nats."""
        return cross_entropy(self(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def text_bytes() -> Tensor:
    from pydoc_data import topics

    text = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()


def batch(data: Tensor, context: int, *, seed: int) -> Tensor:
    """Random windows that follow from the seed alone, so a resumed run sees the same ones."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(data) - context, (BATCH, 1), generator=generator)
    return data[starts + torch.arange(context + 1)]


def keep_last(run: Path, count: int) -> None:
    """Delete all but the newest step files; numbers are compared, since 9 comes before 10."""
    by_step = {int(path.stem.removeprefix("step_")): path for path in run.glob("step_*.pt")}
    for step in sorted(by_step)[:-count]:
        by_step[step].unlink()
        print(f"deleted {by_step[step].name}")


class Training:
    """A model and its optimizer in a run directory: fresh, or as the latest checkpoint has them."""

    def __init__(self, run: Path, *, lr: float) -> None:
        self.run, self.step, self.best_loss = run, 0, float("inf")
        try:
            checkpoint = mp.load_checkpoint(run / "latest_checkpoint.pt")
        except FileNotFoundError:
            checkpoint = {}
        torch.manual_seed(0)
        self.config = DecoderConfig(**checkpoint.get("config", {}))
        self.model = Decoder(self.config)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)
        if checkpoint:
            self.model.load_state_dict(checkpoint["model_state"])
            self.optimizer.load_state_dict(checkpoint["optimizer"])
            self.step, self.best_loss = checkpoint["step"], checkpoint["best_loss"]
            print(f"resumed from latest_checkpoint.pt: {self.step} steps done")
        else:
            print("no latest_checkpoint.pt: starting with new weights")

    def save(self, name: str, **metadata: Any) -> None:
        mp.save_checkpoint(
            path=self.run / name,
            model_state=self.model.state_dict(),
            optimizer_state=self.optimizer.state_dict(),
            config=asdict(self.config),
            step=self.step,
            best_loss=self.best_loss,
            **metadata,
        )
        print(f"saved {name}")

    def train_step(self, data: Tensor) -> float:
        loss = self.model.loss(batch(data, self.config.context, seed=self.step))
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.step += 1
        return loss.item()

    @torch.no_grad()
    def evaluate(self, data: Tensor) -> float:
        seeds = range(4)
        losses = [self.model.loss(batch(data, self.config.context, seed=seed)) for seed in seeds]
        return torch.stack(losses).mean().item()

    def checkpoint(self, loss: float, val_loss: float, *, keep: int) -> None:
        """Best and numbered files first: the latest is what a resume starts from."""
        print(f"step {self.step}: loss {loss:.3f}, held-out {val_loss:.3f}")
        if val_loss < self.best_loss:
            self.best_loss = val_loss
            self.save("best.pt", loss=loss, val_loss=val_loss)
        self.save(f"step_{self.step}.pt", loss=loss, val_loss=val_loss)
        self.save("latest_checkpoint.pt", loss=loss, val_loss=val_loss)
        keep_last(self.run, keep)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--run", type=Path, default=Path("runs/decoder"))
    parser.add_argument("--steps", type=int, default=60, help="in all, not more")
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--keep-last", type=int, default=3)
    arguments = parser.parse_args()

    data = text_bytes()
    held_out, data = data[: len(data) // 20], data[len(data) // 20 :]
    training = Training(arguments.run, lr=3e-3)
    while training.step < arguments.steps:
        loss = training.train_step(data)
        if training.step % arguments.save_every == 0:
            training.checkpoint(loss, training.evaluate(held_out), keep=arguments.keep_last)
    training.save("decoder_final.pt", val_loss=training.evaluate(held_out), final=True)


if __name__ == "__main__":
    main()
