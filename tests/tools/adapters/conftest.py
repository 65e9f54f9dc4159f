"""The bases that the tests of adapters share; nobody writes into them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools.adapters.peft_oracle import gpt2, gpt_oss, llama, qwen3_moe, write_base

BASES = {
    "llama": llama(),
    "tied": llama(tie_word_embeddings=True),
    "gpt2": gpt2(),
    "qwen3_moe": qwen3_moe(),
    "gpt_oss": gpt_oss(),
}


@pytest.fixture(scope="package")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One small model of each family, of random weights in float32."""
    root = tmp_path_factory.mktemp("bases")
    return {name: write_base(root / name, config) for name, config in BASES.items()}
