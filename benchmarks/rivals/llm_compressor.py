"""llm-compressor's data-free NVFP4 of a directory, in an environment of its own.

PYTHON llm_compressor.py SOURCE OUTPUT OBSERVER

Weights of linear layers but the head become NVFP4 (`model_free_ptq`, scheme NVFP4A16). OBSERVER,
which chooses scales, is a name of llm-compressor's, or `preset` for that of the scheme. Prints
seconds and extra memory as JSON; imports are not timed. Run by benchmarks/quantize_nvfp4.py.
"""

from __future__ import annotations

import json
import sys

from compressed_tensors.quantization import preset_name_to_scheme
from llmcompressor import model_free_ptq
from loguru import logger

from _anonymous import measured

LEFT = ["re:.*lm_head", "re:.*embed_tokens"]


def main() -> None:
    source, output, observer = sys.argv[1:]
    logger.remove()
    scheme = preset_name_to_scheme("NVFP4A16", ["Linear"])
    if observer != "preset":
        scheme.weights.observer = observer
    run = measured(lambda: model_free_ptq(source, output, scheme=scheme, ignore=LEFT))
    print(json.dumps(run))


if __name__ == "__main__":
    main()
