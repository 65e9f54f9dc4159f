"""`load`: the report, the policies, and live state that no refusal has touched."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import milepost as mp
from milepost.errors import (
    ConfigMismatchError,
    DamagedError,
    DtypeMismatchError,
    KeyMismatchError,
    LoadTornError,
    MismatchError,
    NotCommittedError,
    NotFoundError,
    ShapeMismatchError,
)
from milepost.format.header import read_header
from tests.directories import reseal
from tests.states import bits, flip, same, snapshot, train, training


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A checkpoint of step 3."""
    place = tmp_path / "run" / "checkpoint-3"
    metrics = {"loss": 0.5}
    mp.save(place, training(steps=3), step=3, epoch=0.75, metrics=metrics)
    return place


def refused(
    path: Path, live: dict[str, Any], error: type[Exception], message: str, **arguments: Any
) -> BaseException:
    """The load is refused with the message, and live state and random state are as they were."""
    before, draws = snapshot(live), torch.get_rng_state()
    with pytest.raises(error, match=message) as caught:
        mp.load(path, live, **arguments)
    assert same(snapshot(live), before)
    assert torch.equal(torch.get_rng_state(), draws)
    return caught.value


# The report.


def test_a_load_of_everything_is_exact_and_its_report_says_so(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    live = training(seed=8)
    with caplog.at_level(logging.INFO, logger="milepost"):
        report = mp.load(path, live)
    assert same(snapshot(live), snapshot(training(steps=3)))
    assert report.level is mp.Level.EXACT
    assert (report.step, report.epoch, report.metrics) == (3, 0.75, {"loss": 0.5})
    assert report.checkpoint_id == mp.Checkpoint.open(path).info.checkpoint_id
    assert report.models["model"].filled == 8
    assert report.lines() == [
        f"{path}: step 3, exact",
        "model: 8 tensors asked for, 8 found, 8 filled",
        "optimizer: state of 7 parameters asked for, 7 found, 7 filled from 14 tensors",
    ]
    assert f"{path}: step 3, exact" in caplog.text
    assert not (report.not_loaded or report.kept or report.differences or report.notes)


def test_weights_alone_are_weights_only_and_the_report_names_what_was_left(path: Path) -> None:
    report = mp.load(path, {"model": training(seed=8)["model"]})
    assert report.level is mp.Level.WEIGHTS_ONLY
    assert sorted(report.not_loaded) == ["optimizer", "progress", "scheduler"]
    assert "not asked for: " in "\n".join(report.lines())
    draws = torch.get_rng_state()
    assert report.restore_rng() == []
    assert torch.equal(torch.get_rng_state(), draws)


def test_leaving_something_out_is_a_warm_restart(path: Path) -> None:
    live = training(seed=8)
    del live["scheduler"]
    report = mp.load(path, live)
    assert report.level is mp.Level.WARM_RESTART
    assert report.not_loaded == ["scheduler"]


def test_fresh_moments_are_asked_for_and_the_optimizer_forgets_its_steps(path: Path) -> None:
    live = training(seed=8, steps=1)
    report = mp.load(path, live, moments=mp.Moments.FRESH)
    assert report.level is mp.Level.WARM_RESTART
    assert not live["optimizer"].state
    assert all(param.grad is None for param in live["model"].parameters())
    assert live["scheduler"].last_epoch == 3
    assert report.fresh_moments == {"optimizer": "as asked"}


def test_what_can_break_bits_is_listed_and_lowers_the_level(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 977)
    report = mp.load(path, training(seed=8))
    assert report.level is mp.Level.EXACT_STATE
    (line,) = report.differences
    assert line.startswith("threads: saved with ") and line.endswith("now 977")
    assert f"differs: {line}" in report.lines()


def test_another_implementation_of_the_optimizer_is_listed(path: Path) -> None:
    live = training(seed=8)
    live["optimizer"] = torch.optim.AdamW(live["model"].parameters(), lr=0.01, foreach=True)
    live["scheduler"] = torch.optim.lr_scheduler.CosineAnnealingLR(live["optimizer"], T_max=20)
    report = mp.load(path, live)
    assert report.level is mp.Level.EXACT_STATE
    assert any("optimizer" in line and "foreach" in line for line in report.differences)


def test_without_random_state_the_level_is_lower_and_says_why(tmp_path: Path) -> None:
    mp.save(tmp_path / "checkpoint-1", training(), step=1, rng=mp.Rng.LEAVE_OUT)
    report = mp.load(tmp_path / "checkpoint-1", training(seed=3))
    assert report.level is mp.Level.EXACT_STATE
    assert report.differences == ["the checkpoint holds no random state"]


# Policies.


def test_a_missing_and_an_unexpected_name_are_refused_and_then_reported(path: Path) -> None:
    live = training(seed=8)
    live["model"].extra = nn.Linear(2, 2)
    del live["model"].norm
    only = {"model": live["model"]}
    error = refused(path, only, KeyMismatchError, r"2 missing.*2 unexpected")
    assert isinstance(error, KeyMismatchError)
    assert set(error.missing) == {"extra.weight", "extra.bias"}
    assert set(error.unexpected) == {"norm.weight", "norm.bias"}
    refused(path, only, KeyMismatchError, r"unexpected", missing=mp.Missing.KEEP)
    report = mp.load(path, only, missing=mp.Missing.KEEP, unexpected=mp.Unexpected.IGNORE)
    assert set(report.models["model"].missing) == {"extra.weight", "extra.bias"}
    assert set(report.models["model"].unexpected) == {"norm.weight", "norm.bias"}
    text = "\n".join(report.lines())
    assert "model: 2 missing, kept as they were: extra." in text
    assert "model: 2 unexpected, ignored: norm." in text


def test_another_shape_is_refused_with_both_shapes_and_then_skipped(path: Path) -> None:
    live = training(seed=8)
    live["model"].norm = nn.LayerNorm(9)
    only = {"model": live["model"]}
    refused(path, only, ShapeMismatchError, r"norm\.weight.*\(9,\).*\(8,\)|\(8,\).*\(9,\)")
    before = bits(live["model"].norm.weight)
    report = mp.load(path, only, shape=mp.ShapePolicy.SKIP)
    assert {difference.name for difference in report.models["model"].skipped} == {
        "norm.weight",
        "norm.bias",
    }
    assert bits(live["model"].norm.weight) == before
    assert "model: 2 skipped: " in "\n".join(report.lines())


def test_another_type_is_refused_with_both_types_and_then_cast(path: Path) -> None:
    live = {"model": training(seed=8)["model"].bfloat16()}
    refused(path, live, DtypeMismatchError, r"F32.*BF16|BF16.*F32")
    report = mp.load(path, live, dtype=mp.DtypePolicy.CAST)
    expected = training(steps=3)["model"].bfloat16().state_dict()
    assert same(live["model"].state_dict(), expected)
    cast = {difference.name for difference in report.models["model"].cast}
    assert cast == set(live["model"].state_dict()) - {"seen"}
    assert "model: 8 cast: " in "\n".join(report.lines())


def test_an_optimizer_of_another_class_is_refused(path: Path) -> None:
    live = training(seed=8)
    live["optimizer"] = torch.optim.Adam(live["model"].parameters())
    live["scheduler"] = torch.optim.lr_scheduler.CosineAnnealingLR(live["optimizer"], T_max=20)
    refused(path, live, MismatchError, r"AdamW")
    mp.load(path, live, optimizer_class=mp.ClassPolicy.ALLOW)
    assert live["optimizer"].state[live["model"].norm.weight]["step"] == 3


def test_an_entry_that_was_not_saved_is_refused_and_then_kept(path: Path) -> None:
    live = {**training(seed=8), "ema": {"decay": 0.5}}
    refused(path, live, KeyMismatchError, r"holds no ema; it holds model, optimizer, progress")
    report = mp.load(path, live, missing=mp.Missing.KEEP)
    assert report.kept == ["ema"]
    assert live["ema"] == {"decay": 0.5}
    assert report.level is mp.Level.WARM_RESTART


def test_an_optimizer_is_never_filled_from_what_was_none(path: Path) -> None:
    live = training(seed=8)
    swapped = {**live, "progress": live["optimizer"]}
    del swapped["optimizer"]
    refused(path, swapped, DamagedError, r"progress was not saved as an optimizer")


def test_a_live_tie_is_refused_where_the_saved_values_differ_and_made_where_they_agree(
    tmp_path: Path,
) -> None:
    untied = training(steps=2, tied=False)
    mp.save(tmp_path / "checkpoint-1", {"model": untied["model"]}, step=1)
    live = {"model": training(seed=8)["model"]}
    refused(tmp_path / "checkpoint-1", live, MismatchError, r"the model ties .*tie_word_embeddings")
    with torch.no_grad():
        untied["model"].head.weight.copy_(untied["model"].embedding.weight)
    mp.save(tmp_path / "checkpoint-2", {"model": untied["model"]}, step=2)
    mp.load(tmp_path / "checkpoint-2", live)
    assert bits(live["model"].head.weight) == bits(untied["model"].head.weight)


def test_a_saved_tie_fills_both_tensors_of_an_untied_model_and_says_so(path: Path) -> None:
    live = training(seed=8, tied=False)["model"]
    report = mp.load(path, {"model": live})
    assert bits(live.head.weight) == bits(live.embedding.weight)
    assert report.models["model"].untied == (("head.weight", "embedding.weight"),)


def test_a_model_on_the_meta_device_gets_memory_and_the_saved_values(path: Path) -> None:
    with torch.device("meta"):
        live = training()["model"]
    mp.load(path, {"model": live})
    saved = mp.Checkpoint.open(path)
    for name, tensor in live.state_dict().items():
        assert tensor.device.type == "cpu"
        if name != "head.weight":  # tied
            assert torch.equal(tensor, saved.read(name))
    assert live.head.weight is live.embedding.weight


def test_a_configuration_that_differs_is_refused_field_by_field(tmp_path: Path) -> None:
    config = {"hidden_size": 8, "num_layers": 2, "dropout": 0.25, "rope_scaling": (1, 2)}
    mp.save(tmp_path / "checkpoint-1", training(), step=1, model_config=config)
    live = training(seed=8)
    now = {"hidden_size": 16, "num_layers": 2, "dropout": 0.5, "rope_scaling": [1, 2], "new": 1}
    error = refused(
        tmp_path / "checkpoint-1",
        live,
        ConfigMismatchError,
        r"different model/schedule configuration: hidden_size \(checkpoint 8, now 16\)",
        model_config=now,
    )
    assert isinstance(error, ConfigMismatchError)
    assert error.differences == {"hidden_size": (8, 16)}
    report = mp.load(tmp_path / "checkpoint-1", live, model_config={**now, "hidden_size": 8})
    assert report.config == {"dropout": (0.25, 0.5), "new": ("(absent)", 1)}
    assert "model_config.dropout: saved 0.25, now 0.5" in report.lines()


@pytest.mark.case("C7.35")
def test_a_renamed_field_of_a_configuration_is_reported_and_stops_nothing(tmp_path: Path) -> None:
    saved = {"hidden_size": 8, "num_layers": 2}
    mp.save(tmp_path / "checkpoint-1", training(), step=1, model_config=saved)
    now = {"hidden_size": 8, "n_layers": 2}
    report = mp.load(tmp_path / "checkpoint-1", training(seed=8), model_config=now)
    assert report.config == {"num_layers": (2, "(absent)"), "n_layers": ("(absent)", 2)}


# Two phases.


def test_a_path_that_is_wrong_never_means_from_scratch(path: Path) -> None:
    live = training(seed=8)
    refused(path.with_name("checkpoint-4"), live, NotFoundError, r"nothing is there")
    refused(path.parent, live, NotCommittedError, r"a run directory, not a checkpoint")


@pytest.mark.case("C1.1")
def test_a_flipped_byte_is_found_before_anything_is_touched_when_asked(path: Path) -> None:
    part = path / "training" / "optimizer.safetensors"
    header = read_header(part)
    entry = header.tensors["norm.weight.exp_avg"]
    flip(part, header.data_start + entry.start)
    message = r"optimizer\.safetensors: tensor norm\.weight\.exp_avg: .*load an older checkpoint"
    refused(path, training(seed=8), DamagedError, message, verify=mp.Verify.DIGESTS)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"name": "progress.mask"', b'"name": "progress.musk"'),
        (b'"$type": "torch.tensor"', b'"$type": "torch.teapot"'),
        (b'"tokens": ', b'"tokens": NaN, "":'),
        (b'"progress": {', b'"progress": ['),
        (b'"progress": {', b'"PROGRESS": {'),
    ],
    ids=["no such tensor", "no such type", "not strict", "no JSON", "an entry that is gone"],
)
def test_documents_that_cannot_be_decoded_are_found_before_anything_is_touched(
    old: bytes, new: bytes, path: Path
) -> None:
    state = path / "training" / "state.json"
    raw = state.read_bytes()
    assert old in raw
    changed = raw.replace(old, new)
    state.write_bytes(changed)
    reseal(path, lambda document: resize(document, len(changed)))
    refused(path, training(seed=8), DamagedError, r"state\.json")


def resize(document: dict[str, Any], nbytes: int) -> None:
    (entry,) = [e for e in document["files"] if e["name"] == "training/state.json"]
    entry["nbytes"] = nbytes


class Explodes:
    def __init__(self) -> None:
        self.armed = False

    def state_dict(self) -> dict[str, Any]:
        return {"x": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.armed:
            raise RuntimeError("not today")


@pytest.mark.case("C1.6")
def test_an_error_while_filling_is_loud_and_a_later_load_makes_the_state_whole(
    tmp_path: Path,
) -> None:
    bomb = Explodes()
    mp.save(tmp_path / "checkpoint-1", {**training(steps=1), "bomb": bomb}, step=1)
    live = {**training(seed=8), "bomb": bomb}
    bomb.armed = True
    with pytest.raises(LoadTornError, match=r"not today; the state is half loaded") as caught:
        mp.load(tmp_path / "checkpoint-1", live)
    assert isinstance(caught.value.__cause__, RuntimeError)
    bomb.armed = False
    mp.load(tmp_path / "checkpoint-1", live)
    del live["bomb"]
    assert same(snapshot(live), snapshot(training(steps=1)))


def test_a_part_that_is_cut_while_others_are_read_tears_the_load(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint-1"
    mp.save(path, training(steps=1), step=1, max_shard_size=300)
    last = sorted(path.glob("model-*.safetensors"))[-1]

    def cut(nbytes: int) -> None:
        os.truncate(last, 4096)

    options = mp.ReadOptions(threads=1, on_bytes=cut)
    with pytest.raises(LoadTornError, match=rf"{last.name}: ends at byte 4096, .*half loaded"):
        mp.load(path, training(seed=8), options=options)


def test_a_load_keeps_the_objects_it_fills(path: Path) -> None:
    live = training(seed=8, steps=1)
    parameters = [id(p) for p in live["model"].parameters()]
    places = [p.data_ptr() for p in live["model"].parameters()]
    seen = live["progress"]["seen"]
    mp.load(path, live)
    assert [id(p) for p in live["model"].parameters()] == parameters
    assert [p.data_ptr() for p in live["model"].parameters()] == places
    assert live["progress"]["seen"] is seen
    assert all(p in live["optimizer"].state for p in live["model"].parameters())
    train(live, 1)


@pytest.mark.parametrize("threads", [1, 4])
def test_progress_counts_the_tensor_bytes_that_were_read(threads: int, path: Path) -> None:
    seen: list[int] = []
    options = mp.ReadOptions(threads=threads, on_bytes=seen.append)
    mp.load(path, {"model": training(seed=8)["model"]}, options=options)
    header = read_header(path / "model.safetensors")
    assert sum(seen) == header.file_nbytes - header.data_start
