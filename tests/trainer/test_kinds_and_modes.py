"""Every kind of checkpoint on every mode: saved, resumed exactly, taken over, loaded by others.

The names of the cases are the cells of docs/guides/kinds-and-modes.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from sentence_transformers import SentenceTransformer
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import milepost as mp
from tests.states import same
from tests.trainer.kind_runs import (
    CELLS,
    KINDS,
    MODES,
    REFUSED_BY_PEFT,
    WITH_ADAPTERS,
    Runs,
    checks_of,
    family_of,
    name_of,
    shapes_of,
)
from tests.trainer.lora_runs import adapter_of, live_logits, logits_of, token_ids
from tests.trainer.runs import assert_equal
from tests.trainer.task_runs import LABELS
from tests.trainer.yaml_runs import END, SAVED, contents, look

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:sentence_transformers.*"),
    pytest.mark.filterwarnings("ignore::FutureWarning:sentence_transformers.*"),
]

QUICK = {
    *(("merged", "fsdp2", check) for check in checks_of("merged")),
    ("classifier", "tp", "exact"),
    *(("experts", "tp", check) for check in checks_of("experts")),
}
STOCK = {
    "full": AutoModelForCausalLM,
    "value": AutoModelForCausalLM,
    "reward": AutoModelForSequenceClassification,
    "classifier": AutoModelForSequenceClassification,
}
V_HEAD = "v_head.weight"
LEVELS = ("resharded", "exact-state")  # the latter where ranks hold alike: DDP and one process


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))


def case_of(kind: str, mode: str, check: str) -> Any:
    marks = () if (kind, mode, check) in QUICK else pytest.mark.slow
    return pytest.param(kind, mode, check, id=name_of(kind, mode, check), marks=marks)


@pytest.mark.parametrize(("kind", "mode", "check"), [case_of(*cell) for cell in CELLS])
def test_a_kind_of_checkpoint_on_a_mode(kind: str, mode: str, check: str, runs: Runs) -> None:
    _CHECKS[check](runs, kind, mode)


# ---- saved


def is_what_one_process_writes(runs: Runs, kind: str, mode: str) -> None:
    """Intact, of its kind, and whole: no tensor is a rank's part of one."""
    checkpoint = runs.of(kind, mode) / f"checkpoint-{END}"
    alone = runs.of(kind, "one", family_of(kind, mode)) / f"checkpoint-{END}"
    assert mp.Checkpoint.open(checkpoint).verify().problems == ()
    assert mp.checkpoint_kind(checkpoint) is KINDS[kind]
    assert shapes_of(checkpoint, kind) == shapes_of(alone, kind)


# ---- resumed


def ends_with_the_bits_of_a_run_that_never_stopped(runs: Runs, kind: str, mode: str) -> None:
    end = runs.of(kind, mode) / f"checkpoint-{END}"
    resumed_end = runs.train(runs.begun(kind, mode), kind, mode, family_of(kind, mode))
    assert same(contents(resumed_end), contents(end))
    first = end.with_name(f"checkpoint-{SAVED}")
    if kind in WITH_ADAPTERS:
        assert same(adapter_of(resumed_end), adapter_of(end))
        before = adapter_of(first)
        assert not any(torch.equal(before[name], value) for name, value in adapter_of(end).items())
    else:
        assert not same(contents(first)["weights"], contents(end)["weights"])


def is_taken_over_with_the_same_values(runs: Runs, kind: str, mode: str) -> None:
    """By one process; what one process left, by two of FSDP2."""
    other = "fsdp2" if mode == "one" else "one"
    changes = runs.changes(kind, family_of(kind, mode))
    begun = runs.begun(kind, mode)
    checkpoint = begun / f"checkpoint-{SAVED}"
    moments = contents(checkpoint)["state"]["optimizer"]["tensors"]
    for found in look(begun, runs.samples(kind), MODES[other], **changes):
        assert found["step"] == SAVED and found["level"] in LEVELS, found["notes"]
        held = {n: t for n, t in found["moments"].items() if not n.endswith(".step")}
        assert same(dict(sorted(held.items())), dict(sorted(moments.items())))
        if kind in WITH_ADAPTERS:
            learning = {name: t for name, t in found["weights"].items() if "lora_" in name}
            assert same(by_bits(learning), by_bits(adapter_of(checkpoint)))
        else:
            stock = dict(STOCK[kind].from_pretrained(checkpoint).named_parameters())
            if kind == "value":
                stock[V_HEAD] = mp.Checkpoint.open(checkpoint).read(V_HEAD)
            assert found["weights"].keys() == stock.keys()
            assert_equal(found["weights"], stock)


def by_bits(tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Tensors in an order that does not depend on how they are called."""
    return sorted(tensors.values(), key=lambda t: (tuple(t.shape), t.flatten().tolist()))


# ---- loaded by others


def loads_where_people_load_it(runs: Runs, kind: str, mode: str) -> None:
    checkpoint = runs.of(kind, mode) / f"checkpoint-{END}"
    changes = runs.changes(kind, family_of(kind, mode))
    live = live_logits(checkpoint.parent, runs.samples(kind), **changes)
    match kind:
        case "adapter":
            base = AutoModelForCausalLM.from_pretrained(runs.base(family_of(kind, mode)))
            found = logits_of(PeftModel.from_pretrained(base, checkpoint))
        case "embedding":
            sentences: Any = SentenceTransformer(str(checkpoint), device="cpu")
            assert sentences.encode(["1+1="]).shape == (1, live.shape[-1])
            with torch.no_grad():
                found = sentences[0].auto_model.eval()(token_ids()).last_hidden_state
        case "reward" | "classifier":
            stock = AutoModelForSequenceClassification.from_pretrained(checkpoint)
            assert stock.config.num_labels == (LABELS if kind == "classifier" else 1)
            found, live = logits_of(stock), live[:, -1]
        case "value":
            found = with_values(checkpoint)
        case _:
            found = logits_of(AutoModelForCausalLM.from_pretrained(checkpoint))
    assert found.shape == live.shape
    assert torch.allclose(found, live, rtol=1e-4, atol=1e-4)


def with_values(checkpoint: Path) -> torch.Tensor:
    """The logits of transformers, and what the head, which lies in the same files, makes of the
    hidden states."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    with torch.no_grad():
        output = model(token_ids(), output_hidden_states=True)
        values = output.hidden_states[-1] @ mp.Checkpoint.open(checkpoint).read(V_HEAD).T
        return torch.cat((output.logits, values), dim=-1)


def is_refused_by_peft(runs: Runs, kind: str, mode: str) -> None:
    checkpoint = runs.of(kind, mode) / f"checkpoint-{END}"
    base = AutoModelForCausalLM.from_pretrained(runs.base(family_of(kind, mode)))
    with pytest.raises((ValueError, KeyError), match="LORA_WITH_EP_EXPERT_LORA"):
        PeftModel.from_pretrained(base, checkpoint)


_CHECKS = {
    "save": is_what_one_process_writes,
    "exact": ends_with_the_bits_of_a_run_that_never_stopped,
    "reshard": is_taken_over_with_the_same_values,
    "loads": loads_where_people_load_it,
    REFUSED_BY_PEFT: is_refused_by_peft,
}
