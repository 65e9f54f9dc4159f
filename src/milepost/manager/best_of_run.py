"""The best checkpoint of a run, by the metric that its manifest states."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from milepost.errors import InvalidInputError, NotFoundError
from milepost.hf.trainer_state import BestCheckpoint
from milepost.layouts.run import RunEntry, RunListing, list_run
from milepost.manager.best import BestMetric
from milepost.manager.prune import kept_entries
from milepost.manager.retention import finite_metric


def best_entry(listing: RunListing, metric: BestMetric) -> RunEntry | None:
    """Of what counts, the one with the best finite value; of equals, the newest."""
    kept = metric.as_retention().keeps(kept_entries(listing))
    best = [entry for entry in listing.current if entry.step in kept]
    return best[-1] if best else None


def best_of_run(run: Path, metric: BestMetric | None) -> BestCheckpoint | None:
    """The best checkpoint as it is named in `trainer_state.json`; None when nothing is best."""
    if metric is None or not run.is_dir():
        return None
    entry = best_entry(list_run(run), metric)
    if entry is None:
        return None
    value = finite_metric(entry.manifest.metrics.get(metric.name))
    assert value is not None, "only what has a value is best"
    return BestCheckpoint(metric=value, step=entry.step, path=str(run / entry.name))


def require_best(run: Path, metric: BestMetric | None) -> RunEntry:
    """The best checkpoint; `InvalidInputError` or `NotFoundError` say why there is none."""
    if metric is None:
        raise InvalidInputError(
            "load_best: the manager was made with best=None; say by which metric a checkpoint is "
            "the best, for instance best=BestMetric('eval_loss')"
        )
    listing = list_run(run)
    entry = best_entry(listing, metric)
    if entry is not None:
        return entry
    if not listing.current:
        raise NotFoundError(f"{run}: no committed checkpoint to choose the best of", path=run)
    raise NotFoundError(
        f"{run}: none of {len(listing.current)} checkpoints was saved with a finite metric "
        f"{metric.name!r}, so none is the best; they have {_names(listing.current)}: pass "
        "metrics= to save, or name another metric with best=BestMetric(...)",
        path=run,
    )


def _names(entries: Iterable[RunEntry]) -> str:
    found = sorted({name for entry in entries for name in entry.manifest.metrics})
    return ", ".join(found) or "no metrics"
