"""The model card: one tag more, and not a byte else."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from milepost.errors import FormatError
from milepost.hf.aux_files import collect_model_files
from milepost.hf.card import MalformedCard, is_hub_id, tag_card
from tests.hf.conftest import make_model


def tagged(text: str) -> str:
    result = tag_card(text.encode())
    assert result is not None
    return result.decode()


def test_a_new_card_has_tags_only() -> None:
    assert tag_card(None) == b"---\ntags:\n- milepost\n---\n"


def test_a_new_adapter_card_names_library_and_base_model_if_it_is_a_hub_id(tmp_path: Path) -> None:
    assert tag_card(None, library_name="peft", base_model="meta-llama/Llama-3.2-1B") == (
        b"---\nbase_model: meta-llama/Llama-3.2-1B\nlibrary_name: peft\ntags:\n- milepost\n---\n"
    )
    for local in (str(tmp_path), "./out/run", "../x", "a/b/c", "runs--x"):
        assert not is_hub_id(local)
        card = tag_card(None, library_name="peft", base_model=local)
        assert card == b"---\nlibrary_name: peft\ntags:\n- milepost\n---\n"


EDITS = {
    "a list": ("tags:\n- a\n- b\nlicense: mit\n", "tags:\n- a\n- b\n- milepost\nlicense: mit\n"),
    "an indented list with comments": (
        "# top\ntags:  # mine\n  - a  # first\n\nlicense: mit\n",
        "# top\ntags:  # mine\n  - a  # first\n  - milepost\n\nlicense: mit\n",
    ),
    "a list at the end": ("license: mit\ntags:\n- a\n", "license: mit\ntags:\n- a\n- milepost\n"),
    "a flow list": ("tags: [a, 'b']\nx: 1\n", "tags: [a, 'b', milepost]\nx: 1\n"),
    "an empty flow list": ("tags: []\n", "tags: [milepost]\n"),
    "a text": ("tags: a\nx: 1\n", "tags: [a, milepost]\nx: 1\n"),
    "a text with a colon": ('tags: "a: b"\n', 'tags: ["a: b", milepost]\n'),
    "nothing": ("tags:\nx: 1\n", "tags: [milepost]\nx: 1\n"),
    "null": ("tags: null\n", "tags: [milepost]\n"),
    "no tags": ("license: mit\nx: {a: 1}\n", "license: mit\nx: {a: 1}\ntags:\n- milepost\n"),
    "no metadata": ("\n", "\ntags:\n- milepost\n"),
    "a flow mapping": ("{license: mit}\n", "{license: mit, tags: [milepost]}\n"),
}


@pytest.mark.parametrize("kind", EDITS)
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_only_the_tags_entry_of_an_existing_card_changes(kind: str, newline: str) -> None:
    before, after = EDITS[kind]
    body = "# Title\n\n---\ntags: no\n---\nlast line without newline é"
    card = f"---\n{before}---\n{body}".replace("\n", newline)
    assert tagged(card) == f"---\n{after}---\n{body}".replace("\n", newline)


@pytest.mark.parametrize(
    "card", ["---\ntags: [x, milepost]\n---\nbody", "---\ntags: milepost\n---"]
)
def test_a_tagged_card_is_not_touched(card: str) -> None:
    assert tagged(card) == card


def test_a_card_without_metadata_gets_some_and_keeps_its_body() -> None:
    assert tagged("# Title\r\nText") == "---\r\ntags:\r\n- milepost\r\n---\r\n# Title\r\nText"


MALFORMED = {
    "---\n- a\n- b\n---\n": "README.md: the metadata is a list, expected a mapping",
    "---\ntags: {a: 1}\n---\n": "README.md: tags is a dict, expected a list or a text",
    "---\ntags: 3\n---\n": "README.md: tags is a int, expected a list or a text",
    "---\ntags: [a\n---\n": "README.md: the metadata is not YAML",
}


@pytest.mark.parametrize("card", MALFORMED)
def test_a_malformed_card_raises_or_is_left_alone_as_asked(card: str) -> None:
    with pytest.raises(FormatError) as caught:
        tag_card(card.encode())
    assert str(caught.value).startswith(MALFORMED[card])
    assert tag_card(card.encode(), malformed=MalformedCard.KEEP) is None


def test_a_card_that_is_not_text_is_malformed() -> None:
    assert tag_card(b"---\nx: \xff\n---\n", malformed=MalformedCard.KEEP) is None


SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=8))
VALUES = st.one_of(SCALARS, st.lists(SCALARS, max_size=3))
TAGS = st.one_of(st.none(), st.text(max_size=8), st.lists(st.text(max_size=8), max_size=3))


@given(
    metadata=st.dictionaries(st.text(min_size=1, max_size=6), VALUES, max_size=4),
    tags=TAGS,
    flow=st.sampled_from([True, False, None]),
    body=st.text(max_size=20),
)
def test_any_metadata_keeps_its_keys_values_and_order(
    metadata: dict[str, object], tags: object, flow: bool | None, body: str
) -> None:
    metadata = {**metadata, "tags": tags}
    block = yaml.safe_dump(metadata, sort_keys=False, default_flow_style=flow)
    body = body.encode("utf-8", "replace").decode()
    result = tagged(f"---\n{block}---\n{body}")
    front, _, rest = result.removeprefix("---\n").partition("\n---\n")
    edited = yaml.safe_load(front)
    old = [tags] if isinstance(tags, str) else list(tags or [])  # type: ignore[call-overload]
    expected = old if "milepost" in old else [*old, "milepost"]
    assert list(edited) == list(metadata)
    assert edited == {**metadata, "tags": expected}
    assert rest == body


def test_the_card_of_the_source_is_carried_and_a_broken_one_is_reported_once(
    tmp_path: Path,
) -> None:
    model = make_model("llama")
    assert collect_model_files(model, ties={}, dtype_names=[]).files["README.md"] == tag_card(None)
    model.config._name_or_path = str(tmp_path)
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n# Base\n")
    aux = collect_model_files(model, ties={}, dtype_names=[])
    assert aux.files["README.md"] == b"---\nlicense: mit\ntags:\n- milepost\n---\n# Base\n"
    (tmp_path / "README.md").write_text("---\n- no\n---\n")
    first = collect_model_files(model, ties={}, dtype_names=[])
    assert first.files["README.md"] == b"---\n- no\n---\n"
    assert len(first.notes) == 1 and "copied without the tag" in first.notes[0]
    assert collect_model_files(model, ties={}, dtype_names=[]).notes == []
