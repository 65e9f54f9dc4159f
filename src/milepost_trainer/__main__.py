"""`torchrun ... -m milepost_trainer run.yaml`, or `milepost-train run.yaml` for one process."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

import torch.distributed as dist

import milepost as mp
from milepost_trainer.config import ConfigError, read_config
from milepost_trainer.training import train

FAILED, MISUSE = 1, 2


def main() -> int:
    parser = argparse.ArgumentParser(prog="milepost-train", description="Train a language model.")
    parser.add_argument("config", type=Path, help="the YAML of the run")
    path: Path = parser.parse_args().config
    if dist.is_torchelastic_launched():
        dist.init_process_group()
    _log_to_stdout(dist.get_rank() if dist.is_initialized() else 0)
    try:
        train(read_config(path))
    except ConfigError as error:
        sys.stderr.write(f"milepost-train: {error}\n")
        return MISUSE
    except mp.errors.CheckpointError as error:
        sys.stderr.write(f"milepost-train: {error}\n")
        return FAILED
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


def _log_to_stdout(rank: int) -> None:
    """The lines of rank 0, and warnings of every rank."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s" if rank == 0 else f"{rank}: %(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    if rank == 0:
        logging.getLogger("milepost_trainer").setLevel(logging.INFO)


if __name__ == "__main__":
    sys.exit(main())
