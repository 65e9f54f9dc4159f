"""Where a streamed data set stands."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import milepost as mp
from milepost.errors import CheckpointWarning, FormatError, MismatchError, NotFoundError
from tests.manager.small_training import Training
from tests.worlds import run_world


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.txt"
    path.write_text("".join(f"line {number}\n" for number in range(40)))
    return path


def lines_of(path: Path, cursor: mp.StreamCursor, reader: int, readers: int) -> Iterator[str]:
    """The lines of one reader from its cursor on, in the way of the format."""
    shard = cursor.shard(str(reader))
    lines = [line for line in path.read_text().splitlines() if line.strip()]
    for number in range(shard.line_index, len(lines)):
        shard.line_index = number + 1
        if number % readers == reader:
            yield lines[number]


def test_states_survive_the_way_through_plain_dicts() -> None:
    state = mp.StreamDataState({"0": mp.StreamShardState(7, [1, 2, 3])})
    data = state.to_dict()
    assert data == {"shards": {"0": {"line_index": 7, "token_buffer": [1, 2, 3]}}}
    assert mp.StreamDataState.from_dict(data) == state
    assert mp.shard_key(2, num_workers=4, worker=1) == "9"


@pytest.mark.parametrize(
    ("data", "place"),
    [
        ([], r"stream_data\.shards"),
        ({"shards": []}, r"stream_data\.shards"),
        ({"shards": {"0": 5}}, r"shards\['0'\]: expected a dict"),
        ({"shards": {"0": {"line_index": -1}}}, r"shards\['0'\]\.line_index"),
        ({"shards": {"0": {"line_index": True}}}, r"line_index"),
        ({"shards": {"3": {"token_buffer": ["a"]}}}, r"shards\['3'\]\.token_buffer"),
    ],
)
def test_a_malformed_cursor_is_refused_by_place(data: Any, place: str) -> None:
    with pytest.raises(FormatError, match=place):
        mp.StreamDataState.from_dict(data)


@pytest.mark.parametrize("stop", [1, 7, 19])
def test_a_resumed_stream_repeats_nothing_and_skips_nothing(corpus: Path, stop: int) -> None:
    cursor = mp.StreamCursor(mp.local_source(corpus), world_size=2)
    stream = lines_of(corpus, cursor, 0, 2)
    seen = [next(stream) for _ in range(stop)]
    other = mp.StreamCursor(mp.local_source(corpus), world_size=2)
    other.load_checkpoint_state(cursor.get_checkpoint_state())
    assert seen + list(lines_of(corpus, other, 0, 2)) == [f"line {n}" for n in range(0, 40, 2)]


def test_a_cursor_goes_through_a_checkpoint(tmp_path: Path, corpus: Path) -> None:
    cursor = mp.StreamCursor(mp.local_source(corpus), world_size=1)
    cursor.shard("0").line_index = 12
    cursor.shard("0").token_buffer = [5, 6]
    training = Training()
    with mp.CheckpointManager(tmp_path / "run", layout=mp.Layout.TRIO) as manager:
        extra = mp.collect_extra_state(cursor)
        manager.save_checkpoint(0, training.model, loss=1.0, extra_state=extra)
    other = mp.StreamCursor(mp.local_source(corpus), world_size=1)
    with mp.CheckpointManager(tmp_path / "run", layout=mp.Layout.TRIO) as manager:
        manager.load_checkpoint(training.model)
        mp.load_extra_state(manager.loaded_extra_state, other)
    assert other.state == cursor.state


def test_a_flat_fragment_of_an_older_program_is_understood() -> None:
    flat = {
        "global_step": 3,
        "stream_data": {"shards": {"0": {"line_index": 4, "token_buffer": []}}},
        "stream_source": "corpus-v1",
    }
    cursor = mp.StreamCursor(mp.hf_source("corpus"), world_size=8)
    with pytest.raises(MismatchError, match="corpus-v1"):
        mp.load_extra_state(flat, cursor)
    del flat["stream_source"]
    mp.load_extra_state(flat, cursor)
    assert cursor.state.shards["0"].line_index == 4, "no world size was recorded, none is compared"


def test_another_source_is_refused_with_both_named(tmp_path: Path, corpus: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_bytes(corpus.read_bytes())
    saved = mp.StreamCursor(mp.local_source(corpus)).get_checkpoint_state()
    cursor = mp.StreamCursor(mp.local_source(other))
    with pytest.raises(MismatchError) as raised:
        cursor.load_checkpoint_state(saved)
    assert str(corpus) in str(raised.value)
    assert str(other) in str(raised.value)
    assert cursor.state.shards == {}
    inner = mp.hf_source("wiki", split="train")
    deduped = mp.dedup_source(inner, hash_algo="md5", normalizer="lower")
    with pytest.raises(MismatchError):
        mp.StreamCursor(inner).load_checkpoint_state(
            mp.StreamCursor(deduped).get_checkpoint_state()
        )
    with pytest.raises(NotFoundError, match="no such data file"):
        mp.local_source(tmp_path / "nothing.txt")


def test_an_edited_file_is_warned_about_and_a_touched_one_is_not(corpus: Path) -> None:
    saved = mp.StreamCursor(mp.local_source(corpus)).get_checkpoint_state()
    os.utime(corpus, (1, 1))
    mp.StreamCursor(mp.local_source(corpus)).load_checkpoint_state(saved)
    corpus.write_text(corpus.read_text().replace("line 7\n", "line x\n"))
    for source in (
        mp.local_source(corpus),
        mp.dedup_source(mp.local_source(corpus), hash_algo="md5", normalizer="lower"),
    ):
        before = dict(saved)
        if source["type"] == "dedup":
            before["stream_source"] = {**source, "inner": saved["stream_source"]}
        with pytest.warns(CheckpointWarning, match="was edited since the checkpoint"):
            mp.StreamCursor(source).load_checkpoint_state(before)


@pytest.mark.parametrize("state_first", [True, False])
def test_another_number_of_readers_is_refused_in_either_order(
    corpus: Path, state_first: bool
) -> None:
    saved = mp.StreamCursor(mp.local_source(corpus), world_size=4).get_checkpoint_state()
    cursor = mp.StreamCursor(mp.local_source(corpus))

    def load() -> None:
        cursor.load_checkpoint_state(saved)

    def tell() -> None:
        cursor.set_world_size(2)

    first, second = (load, tell) if state_first else (tell, load)
    first()
    with pytest.raises(MismatchError, match="written by 4 readers, this run has 2"):
        second()


def test_as_many_readers_or_none_recorded_is_accepted(corpus: Path) -> None:
    saved = mp.StreamCursor(mp.local_source(corpus), world_size=4).get_checkpoint_state()
    mp.StreamCursor(mp.local_source(corpus), world_size=4).load_checkpoint_state(saved)
    del saved["stream_world_size"]
    mp.StreamCursor(mp.local_source(corpus), world_size=2).load_checkpoint_state(saved)


def gather_cursors(rank: int, world_size: int) -> dict[str, Any]:
    cursor = mp.StreamCursor(mp.hf_source("wiki"), world_size=world_size)
    old = {str(reader): {"line_index": 90, "token_buffer": []} for reader in range(world_size)}
    cursor.load_checkpoint_state({"stream_data": {"shards": old}})
    cursor.shard(str(rank)).line_index = 10 + rank  # the corpus began again
    return cursor.get_checkpoint_state()["stream_data"]["shards"]  # type: ignore[no-any-return]


def test_rank_0_gets_the_cursors_of_all_ranks() -> None:
    first, _ = run_world(2, gather_cursors)
    assert {key: shard["line_index"] for key, shard in first.items()} == {"0": 10, "1": 11}
