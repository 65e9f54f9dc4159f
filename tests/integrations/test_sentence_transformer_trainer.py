"""sentence-transformers' trainer with Milepost's checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import sentence_transformers
import torch
import transformers

import milepost as mp
from tests.integrations.embedding_trainers import make, outcome, write_base
from tests.integrations.trainers import KillAt, bits, run

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:sentence_transformers.*"),
    pytest.mark.filterwarnings("ignore::FutureWarning:sentence_transformers.*"),
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning"),
]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_base(tmp_path / "base")


@pytest.mark.parametrize("classifier", [False, True], ids=["ranking", "softmax"])
def test_an_embedding_model_resumes_to_the_bits_of_one_that_never_stopped(
    base: Path, tmp_path: Path, classifier: bool
) -> None:
    whole = run(make(base, tmp_path / "whole", classifier=classifier))
    run(make(base, tmp_path / "run", kill_at=5, classifier=classifier))
    resumed = run(make(base, tmp_path / "run", classifier=classifier), resume=True)
    assert (resumed.milepost_report.step, resumed.milepost_report.level) == (3, mp.Level.EXACT)
    assert outcome(resumed) == outcome(whole)
    assert (tmp_path / "run" / "checkpoint-8" / "loss").is_dir() == classifier


def test_sentence_transformers_loads_the_checkpoint_as_it_lies_there(
    base: Path, tmp_path: Path
) -> None:
    trainer = run(make(base, tmp_path / "run"))
    place = tmp_path / "run" / "checkpoint-8"
    loaded = sentence_transformers.SentenceTransformer(str(place), device="cpu")
    sentences = ["w3 w4 w5", "w9"]
    trainer.model.eval()
    assert torch.equal(
        loaded.encode(sentences, convert_to_tensor=True),
        trainer.model.encode(sentences, convert_to_tensor=True),
    )
    assert [type(module).__name__ for module in loaded] == [
        "Transformer",
        "Pooling",
        "Dense",
        "Normalize",
    ]
    assert loaded.max_seq_length == 16
    card = (place / "README.md").read_text()
    assert "sentence-transformers" in card and "milepost" in card
    assert mp.Checkpoint.open(place).verify().ok


def test_the_best_embedding_model_comes_back_at_the_end(base: Path, tmp_path: Path) -> None:
    scores = iter([3.0, 1.0, 2.0])

    class Scores:
        """An evaluator whose first value is not the best, and whose second is."""

        primary_metric = "score"

        def __call__(self, model: Any, *args: Any, **kwargs: Any) -> dict[str, float]:
            return {"score": next(scores)}

    trainer = make(
        base,
        tmp_path / "run",
        eval_strategy="no",
        max_steps=9,
        save_total_limit=1,
        load_best_model_at_end=False,
    )
    trainer.evaluator = Scores()
    trainer.args.eval_strategy = transformers.trainer_utils.IntervalStrategy.STEPS
    trainer.args.eval_steps = 3
    trainer.args.metric_for_best_model = "eval_score"
    trainer.args.greater_is_better = False
    trainer.args.load_best_model_at_end = True
    run(trainer)
    best = sentence_transformers.SentenceTransformer(
        str(tmp_path / "run" / "checkpoint-6"), device="cpu"
    )
    assert bits(best) == bits(trainer.model)


def test_a_checkpoint_of_the_stock_trainer_of_embeddings_resumes_exactly(
    base: Path, tmp_path: Path
) -> None:
    class Stock(sentence_transformers.SentenceTransformerTrainer):  # type: ignore[misc]
        pass

    fine: dict[str, Any] = {"logging_steps": 1}
    whole = run(make(base, tmp_path / "whole", **fine))
    stock = make(base, tmp_path / "stock", kill_at=5, **fine)
    plain = Stock(
        model=stock.model,
        args=stock.args,
        train_dataset=stock.train_dataset,
        loss=stock.loss,
        callbacks=[KillAt(5)],
    )
    run(plain)
    path = str(tmp_path / "stock" / "checkpoint-3")
    resumed = run(make(base, tmp_path / "stock", **fine), resume=path)
    assert outcome(resumed) == outcome(whole)
