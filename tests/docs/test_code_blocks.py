"""The Python code of README.md and docs/ runs: blocks of one page one after the other.

A page starts in an empty directory, with the names of `setup`. A block that cannot run here says
why, in a comment on the line above it: `<!-- not run: it needs a second machine -->`.
"""

from __future__ import annotations

import re
import shutil
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_NOT_RUN = re.compile(r"<!-- not run: \S.* -->")
_WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog")
# Warnings that a page is about.
EXPECTED_WARNINGS: dict[str, type[Warning]] = {"docs/guides/legacy.md": DeprecationWarning}


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Code of a page, and the number of its first line there."""

    code: str
    line: int


def python_blocks(page: Path) -> list[Block]:
    """The blocks to run; ValueError for one that is excused without a reason."""
    found: list[Block] = []
    lines = page.read_text(encoding="utf-8").splitlines()
    start: int | None = None
    for number, line in enumerate(lines):
        if start is None and line.strip() == "```python":
            start = number
        elif start is not None and line.strip() == "```":
            above = lines[start - 1].strip()
            if above.startswith("<!-- not run") and not _NOT_RUN.fullmatch(above):
                raise ValueError(f"{page}:{start}: say why it is not run: <!-- not run: reason -->")
            if not _NOT_RUN.fullmatch(above):
                code = "\n".join(lines[start + 1 : number])
                found.append(Block(code=code + "\n", line=start + 2))
            start = None
    return found


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of a tiny Hugging Face model with its tokenizer."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    words = {word: i for i, word in enumerate(("<pad>", "<s>", "</s>", "<unk>", *_WORDS))}
    inner = Tokenizer(WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=True,
    )
    directory = tmp_path_factory.mktemp("base") / "my-base"
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def setup(base: Path) -> dict[str, Any]:
    """The names that a page may use without making them: objects of one small training."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    batches = torch.randint(4, 12, (16, 2, 8), generator=torch.Generator().manual_seed(0))

    def train_step(model: Any, optimizer: Any, batch: Any = None) -> float:
        tokens = batches[0] if batch is None else batch
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    def evaluate(model: Any) -> float:
        with torch.no_grad():
            return float(model(input_ids=batches[0], labels=batches[0]).loss)

    train_step(model, optimizer)
    return {
        "__name__": "page",
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.LinearLR(optimizer),
        "tokenizer": AutoTokenizer.from_pretrained(base),
        "loader": list(batches),
        "train_step": train_step,
        "evaluate": evaluate,
    }


def write_foreign_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A `.pt` with an object of `train.TrainConfig`, a class that no page has."""
    config = type("TrainConfig", (), {"__module__": "train"})
    monkeypatch.setitem(sys.modules, "train", SimpleNamespace(TrainConfig=config))
    instance = config()
    instance.lr = 0.1
    torch.save({"model_state": {"w": torch.ones(1)}, "config": instance}, path)
    monkeypatch.delitem(sys.modules, "train")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_code_of_a_page_runs(
    page: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = python_blocks(page)
    if not blocks:
        pytest.skip("no Python on this page")
    monkeypatch.chdir(tmp_path)
    shutil.copytree(base, tmp_path / "my-base")
    write_foreign_file(tmp_path / "config.pt", monkeypatch)
    names = setup(base)
    expected = EXPECTED_WARNINGS.get(page.relative_to(ROOT).as_posix())
    with warnings.catch_warnings():
        if expected is not None:
            warnings.simplefilter("ignore", expected)
        for block in blocks:
            # Empty lines in front, so that an error shows its line of the page.
            text = "\n" * (block.line - 1) + block.code
            code = compile(text, str(page), "exec", dont_inherit=True)
            exec(code, names)  # noqa: S102
