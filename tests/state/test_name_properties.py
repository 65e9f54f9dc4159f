"""Compile segments go, wherever they stand; nothing else of a name does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from milepost.errors import InvalidInputError
from milepost.state.names import strip_compile_prefix

word = st.sampled_from(["model", "module", "layers", "0", "weight", "_orig_modular", "x_orig_mod"])
parts = st.lists(word, min_size=1, max_size=5)


@given(parts, st.data())
def test_compile_segments_anywhere_are_removed_and_only_they(
    name: list[str], data: st.DataObject
) -> None:
    wrapped = list(name)
    for _ in range(data.draw(st.integers(0, 3))):
        wrapped.insert(data.draw(st.integers(0, len(wrapped) - 1)), "_orig_mod")
    assert strip_compile_prefix({".".join(wrapped): 1}) == {".".join(name): 1}


@given(st.lists(parts, min_size=1, max_size=6, unique_by=tuple))
def test_stripping_twice_is_stripping_once_and_keeps_the_order(names: list[list[str]]) -> None:
    state = {".".join(["_orig_mod", *name]): number for number, name in enumerate(names)}
    once = strip_compile_prefix(state)
    assert strip_compile_prefix(once) == once
    assert list(once.values()) == list(range(len(names)))


@given(parts)
def test_two_names_that_become_one_are_refused_with_both(name: list[str]) -> None:
    plain, wrapped = ".".join(name), ".".join(["_orig_mod", *name])
    with pytest.raises(InvalidInputError) as caught:
        strip_compile_prefix({plain: 1, wrapped: 2})
    assert plain in str(caught.value) and wrapped in str(caught.value)
