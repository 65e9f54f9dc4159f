"""Attention sinks of GPT-OSS: one more logit for each head, which takes a part of the attention.

A run that trains adapters on a base whose sinks it has put out makes adapters that fit no other
base. So what was done with them is written beside the weights of every checkpoint.
"""

from __future__ import annotations

import json
import logging
from enum import StrEnum
from pathlib import Path

import torch
from torch import nn

from milepost_trainer.config import ConfigError, TrainerConfig
from milepost_trainer.parallel import ParallelModel

SIDECAR = "training_provenance.json"
KEY = "gpt_oss_attention_sinks"
_PARAMETER = "sinks"
NEUTRAL_SINK = -1e4  # no attention in any float type, and finite in every cast
logger = logging.getLogger(__name__)


class SinkPolicy(StrEnum):
    """What becomes of the sinks in a run."""

    LIVE = "live"
    """They act as the base has them, and are not trained."""
    TRAINABLE = "trainable"
    """They act and are trained, as every weight is that no adapter stands for."""
    NEUTRALIZED = "neutralized"
    """They are put out: a logit so low takes no part of the attention."""


def policy_of(config: TrainerConfig) -> SinkPolicy:
    """What the YAML asks, or what it comes to: without adapters every weight is trained."""
    if config.reset_sinks:
        return SinkPolicy.NEUTRALIZED
    if config.sinks is not None:
        return SinkPolicy(config.sinks)
    return SinkPolicy.TRAINABLE if config.lora is None else SinkPolicy.LIVE


def prepare_sinks(model: nn.Module, policy: SinkPolicy) -> None:
    """Puts the sinks of a model that is not cut yet into the state that the policy asks for.

    `ValueError` when it has none.
    """
    found = list(sinks_of(model))
    if not found:
        raise ValueError(
            f"sinks and reset_sinks are about attention sinks, which {type(model).__name__} does "
            "not have"
        )
    for sinks in found:
        if policy is SinkPolicy.NEUTRALIZED:
            with torch.no_grad():
                sinks.fill_(NEUTRAL_SINK)
        sinks.requires_grad_(policy is SinkPolicy.TRAINABLE)


def sinks_of(model: nn.Module) -> list[nn.Parameter]:
    """The sinks of all layers."""
    return [
        param for name, param in model.named_parameters() if name.rpartition(".")[2] == _PARAMETER
    ]


class Sinks:
    """The record of a run's policy; empty for a model without sinks."""

    def __init__(self, config: TrainerConfig, model: ParallelModel) -> None:
        self.policy = policy_of(config)
        self._has_any = any(sinks_of(module) for module in model.modules)

    def record(self) -> dict[str, str]:
        """What `training_provenance.json` has to say of them."""
        return {KEY: str(self.policy)} if self._has_any else {}

    def check(self, checkpoint: Path) -> None:
        """`ConfigError` when the run that wrote `checkpoint` treated them in another way."""
        if not self._has_any:
            return
        path = checkpoint / SIDECAR
        if not path.is_file():
            logger.warning("%s is not there: the sinks are taken to be %s", path, self.policy)
            return
        try:
            saved = json.loads(path.read_text(encoding="utf-8"))[KEY]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}: expected an object with {KEY!r}: {error}") from error
        if saved != self.policy:
            raise ConfigError(
                f"sinks: this run has them {self.policy}, and {path} says that they were {saved}; "
                f"resume with sinks: {saved}, or start a new run"
            )
