"""Files and bases that runs of the reference trainer share; a module writes what it asks for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer.lora_runs import BaseOf, write_base
from tests.trainer.task_runs import TASKS, write_lines
from tests.trainer.yaml_runs import write_text


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A file of samples for each task."""
    directory = tmp_path_factory.mktemp("samples")
    return {task: write_lines(directory, task) for task in TASKS}


@pytest.fixture(scope="module")
def base_of(tmp_path_factory: pytest.TempPathFactory) -> BaseOf:
    """The base of a family for adapters, written when first asked for."""
    directory = tmp_path_factory.mktemp("bases")

    def base(family: str) -> Path:
        place = directory / family
        return place if place.is_dir() else write_base(place, family)

    return base
