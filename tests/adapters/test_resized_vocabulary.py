"""Adapters trained after tokens were added: the plain base gets the rows by itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import milepost as mp
from milepost_trainer.tokens import byte_level_tokenizer
from tests.adapters.lora_models import hold, optimizer_of, randomise
from tests.parallel.models import DDP2, FSDP2, Shape
from tests.states import same
from tests.worlds import run_world

pytestmark = [
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),
]
BASE, GROWN = 32, 36
NEW = torch.arange(BASE - 4, GROWN)[None]  # old tokens and the four new ones
VARIANTS: dict[str, dict[str, Any]] = {
    "frozen": {},
    "trained": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "adapted": {"target_modules": ["embed_tokens", "lm_head", "q_proj"]},
    "dora": {"target_modules": ["embed_tokens", "lm_head", "q_proj"], "use_dora": True},
}
TIED = [False, pytest.param(True, marks=pytest.mark.slow)]


def write_base(directory: Path, *, tied: bool = False) -> Path:
    torch.manual_seed(0)
    settings = LlamaConfig(
        vocab_size=BASE,
        hidden_size=BASE,  # as many as there are rows, so that no axis is known by its size
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    LlamaForCausalLM(settings).save_pretrained(directory)
    return directory


def adapted(directory: Path, seed: int, rows: int | None, **settings: Any) -> Any:
    """The base of `directory` with an adapter, its vocabulary resized first unless `rows` is
    None."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM.from_pretrained(directory)
    if rows is not None:
        model.resize_token_embeddings(rows)
    wanted = {"r": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM", **settings}
    peft = get_peft_model(model, LoraConfig(**wanted))
    randomise(peft, seed)
    return peft.train()


def steps(model: Any, optimizer: torch.optim.Optimizer, count: int) -> list[float]:
    losses = []
    for _ in range(count):
        loss = model(input_ids=NEW, labels=NEW).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=NEW).logits
    return found


def sizes_of(model: Any) -> dict[str, int]:
    """Everything that states how many tokens there are."""
    inner = model.get_base_model()
    head = inner.get_output_embeddings()
    return {
        "config": inner.config.vocab_size,
        "model": inner.vocab_size,
        "input": inner.get_input_embeddings().weight.shape[0],
        "output": head.weight.shape[0],
        "out_features": head.out_features,
    }


@pytest.mark.case("V51")
@pytest.mark.parametrize("tied", TIED)
@pytest.mark.parametrize("rows", [GROWN, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_plain_base_gets_the_rows_of_new_tokens_and_trains_on_exactly(
    variant: str, rows: int, tied: bool, tmp_path: Path
) -> None:
    base, settings = write_base(tmp_path / "base", tied=tied), VARIANTS[variant]
    model = adapted(base, 5, rows, **settings)
    optimizer = optimizer_of(model)
    steps(model, optimizer, 2)
    place = tmp_path / "checkpoint-2"
    mp.save(place, {"model": model, "optimizer": optimizer}, step=2)

    second = adapted(base, 9, None, **settings)
    params = dict(second.named_parameters())
    optimizer2 = optimizer_of(second)
    assert sizes_of(second)["input"] == BASE
    report = mp.load(place, {"model": second, "optimizer": optimizer2})
    assert report.level is mp.Level.EXACT
    assert any(f"enlarged from {BASE} to {rows} tokens" in note for note in report.notes)
    assert sizes_of(second) == sizes_of(model) == dict.fromkeys(sizes_of(model), rows)
    after = dict(second.named_parameters())
    assert all(after[name] is param for name, param in params.items())
    assert torch.equal(logits(second), logits(model))
    assert steps(second, optimizer2, 3) == steps(model, optimizer, 3)
    assert same(second.state_dict(), model.state_dict())


@pytest.mark.case("V51")
@pytest.mark.parametrize("variant", ["frozen", "trained"])
def test_merged_weights_have_the_new_rows_and_the_tokenizer_comes_along(
    variant: str, tmp_path: Path
) -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.add_tokens(["<a>", "<b>"])
    base, settings = write_base(tmp_path / "base"), VARIANTS[variant]
    model = adapted(base, 5, GROWN, **settings)
    steps(model, optimizer_of(model), 1)
    place, merged = tmp_path / "checkpoint-1", tmp_path / "checkpoint-2"
    mp.save(place, {"model": model}, step=1, processing_class=tokenizer)
    assert len(AutoTokenizer.from_pretrained(place)) == len(tokenizer)

    second = adapted(base, 9, None, **settings)
    mp.load(place, {"model": second})
    options: dict[str, Any] = {"adapters": mp.Adapters.MERGED, "processing_class": tokenizer}
    mp.save(merged, {"model": second}, step=2, **options)
    assert json.loads((merged / "config.json").read_text())["vocab_size"] == GROWN
    assert len(AutoTokenizer.from_pretrained(merged)) == len(tokenizer)
    plain, info = LlamaForCausalLM.from_pretrained(merged, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    torch.testing.assert_close(logits(plain), logits(model), rtol=1e-5, atol=1e-6)
    third = adapted(base, 7, None, **settings)  # from the unmerged one beside the weights
    mp.load(merged, {"model": third})
    assert torch.equal(logits(third), logits(model))


@pytest.mark.case("V51")
def test_what_peft_wrote_after_tokens_were_added_loads_on_the_plain_base(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    model = adapted(base, 5, GROWN)
    steps(model, optimizer_of(model), 1)
    model.save_pretrained(tmp_path / "stock")
    second = adapted(base, 9, None)
    mp.load(tmp_path / "stock", {"model": second})
    assert torch.equal(logits(second), logits(model))


@pytest.mark.parametrize("rows", [GROWN, 40])
def test_our_checkpoint_loads_in_stock_peft_once_the_base_is_resized(
    rows: int, tmp_path: Path
) -> None:
    base = write_base(tmp_path / "base")
    model = adapted(base, 5, rows)
    mp.save(tmp_path / "checkpoint-1", {"model": model}, step=1)
    stock = LlamaForCausalLM.from_pretrained(base)
    stock.resize_token_embeddings(rows)
    loaded = PeftModel.from_pretrained(stock, tmp_path / "checkpoint-1")
    assert torch.equal(logits(loaded), logits(model))


# ---- what cannot be enlarged stays as it was


@pytest.mark.case("V51")
def test_a_load_that_is_refused_leaves_the_base_its_own_rows(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    model = adapted(base, 5, GROWN)
    mp.save(tmp_path / "checkpoint-1", {"model": model}, step=1)
    second = adapted(base, 9, None)
    before = {name: tensor.clone() for name, tensor in second.state_dict().items()}
    sizes = sizes_of(second)
    with pytest.raises(mp.errors.KeyMismatchError, match="holds no counter"):
        mp.load(tmp_path / "checkpoint-1", {"model": second, "counter": [0]})
    assert sizes_of(second) == sizes
    assert same(second.state_dict(), before)


@pytest.mark.case("V51")
def test_a_base_with_more_tokens_than_were_saved_is_told_what_to_do(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    mp.save(tmp_path / "checkpoint-1", {"model": adapted(base, 5, GROWN)}, step=1)
    second = adapted(base, 9, 40)
    with pytest.raises(mp.errors.ShapeMismatchError, match=r"resize_token_embeddings\(36\)"):
        mp.load(tmp_path / "checkpoint-1", {"model": second})
    assert set(sizes_of(second).values()) == {40}


def load_on_ranks(rank: int, world_size: int, shape: Shape, variant: str, directory: Path) -> Any:
    model = hold(adapted(directory / "base", 9, None, **VARIANTS[variant]), shape)
    try:
        mp.load(directory / "checkpoint-1", {"model": model})
    except mp.errors.ShapeMismatchError as error:
        return str(error)
    return logits(model.module if isinstance(model, DistributedDataParallel) else model)


@pytest.mark.case("V51")
def test_replicas_get_the_rows_and_shards_are_told_what_to_do(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    model = adapted(base, 5, GROWN)
    mp.save(tmp_path / "checkpoint-1", {"model": model}, step=1)
    for found in run_world(2, load_on_ranks, DDP2, "frozen", tmp_path):
        assert torch.equal(found, logits(model))
    for found in run_world(2, load_on_ranks, FSDP2, "frozen", tmp_path):
        assert "resize_token_embeddings(36)" in found and "before it is sharded" in found
