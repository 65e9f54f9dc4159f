"""Models of sentence-transformers through the verbs: the library loads them and embeds the same."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from milepost.tools.cast import cast
from milepost.tools.convert_to_bf16 import convert_to_bf16
from milepost.tools.reshard import reshard
from milepost.tools.rewrite.options import RewriteOptions
from tests.hf.conftest import make_model, make_tokenizer
from tests.tools.rewrite.hub import QUICK, read_hub

pytestmark = [
    pytest.mark.skipif(find_spec("sentence_transformers") is None, reason="it is not installed"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
TEXTS = ["the quick brown fox", "the lazy dog", "fox"]


def load(place: Path) -> Any:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(place), device="cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A backbone, a pooling, and a dense layer whose weights lie in a directory of their own."""
    from sentence_transformers import SentenceTransformer, models

    root = tmp_path_factory.mktemp("sentences")
    make_model("llama").model.save_pretrained(root / "backbone")
    make_tokenizer().save_pretrained(root / "backbone")
    backbone = models.Transformer(str(root / "backbone"))
    pooling = models.Pooling(backbone.get_word_embedding_dimension(), "mean")
    torch.manual_seed(1)
    dense = models.Dense(16, 8)
    whole = SentenceTransformer(modules=[backbone, pooling, dense], device="cpu")
    whole.save(str(root / "model"))
    return root / "model"


@pytest.mark.parametrize("verb", ["reshard", "cast"])
def test_what_only_moves_bytes_or_widens_them_embeds_the_same(
    model: Path, tmp_path: Path, verb: str
) -> None:
    out = tmp_path / "out"
    if verb == "reshard":
        reshard(model, out, options=RewriteOptions(max_shard_size="3KB", is_durable=False))
        assert len(list(out.glob("model-*.safetensors"))) > 2
    else:
        cast(model, out, dtype="float32", options=QUICK)
    wanted, found = load(model).encode(TEXTS), load(out).encode(TEXTS)
    assert wanted.shape == (3, 8)
    assert torch.equal(torch.tensor(found), torch.tensor(wanted))


def test_bf16_is_loaded_and_embeds_nearly_the_same(model: Path, tmp_path: Path) -> None:
    convert_to_bf16(model, tmp_path / "out", options=QUICK)
    made = read_hub(tmp_path / "out")
    assert made["layers.0.mlp.up_proj.weight"].dtype == torch.bfloat16
    wanted = torch.tensor(load(model).encode(TEXTS))
    found = torch.tensor(load(tmp_path / "out").encode(TEXTS)).float()
    off = float((found - wanted).norm() / wanted.norm())
    assert 0 < off < 0.05
