"""Tokenizer files and chat templates: what training used is what every reader finds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from milepost.hf.processing import processing_files, stored_templates
from tests.hf.conftest import make_tokenizer

ONE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
TWO = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
USED = "{% for m in messages %}{{ m.content }} é{% endfor %}"
CHAT = [{"role": "user", "content": "fox"}]


def tokenizer_folder(directory: Path, *, inline: str | None, jinja: str | None) -> Path:
    make_tokenizer().save_pretrained(directory)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    if inline is not None:
        config["chat_template"] = inline
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    if jinja is not None:
        (directory / "chat_template.jinja").write_text(jinja)
    return directory


def load(directory: Path) -> Any:
    import transformers

    return transformers.PreTrainedTokenizerFast.from_pretrained(directory)


def write(directory: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content)
    return directory


def rendered_by_each_reader(directory: Path) -> set[str]:
    """The chat as rendered by transformers, by a jinja-file reader and by an inline reader."""
    from jinja2 import Template

    config = json.loads((directory / "tokenizer_config.json").read_text("utf-8"))
    return {
        load(directory).apply_chat_template(CHAT, tokenize=False),
        Template((directory / "chat_template.jinja").read_text("utf-8")).render(messages=CHAT),
        Template(config["chat_template"]).render(messages=CHAT),
    }


@pytest.mark.case("V14")
@pytest.mark.parametrize(("inline", "jinja"), [(ONE, None), (None, ONE), (ONE, TWO)])
def test_an_override_in_training_is_what_every_reader_of_the_export_finds(
    inline: str | None, jinja: str | None, tmp_path: Path
) -> None:
    tokenizer = load(tokenizer_folder(tmp_path / "source", inline=inline, jinja=jinja))
    tokenizer.chat_template = USED
    files, notes = processing_files(tokenizer)
    assert rendered_by_each_reader(write(tmp_path / "out", files)) == {"fox é"}
    assert len(notes) == 1 and notes[0].startswith("chat template: ")
    assert ("hold different ones" in notes[0]) == (inline is not None and jinja is not None)


@pytest.mark.case("V14")
@pytest.mark.parametrize(("inline", "jinja"), [(ONE, None), (None, ONE), (ONE, ONE)])
def test_an_unchanged_template_is_kept_without_a_note(
    inline: str | None, jinja: str | None, tmp_path: Path
) -> None:
    tokenizer = load(tokenizer_folder(tmp_path / "source", inline=inline, jinja=jinja))
    files, notes = processing_files(tokenizer)
    assert rendered_by_each_reader(write(tmp_path / "out", files)) == {"<user>fox"}
    assert notes == []


@pytest.mark.case("V14")
def test_several_templates_by_name_all_come_back(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = {"default": ONE, "tool_use": TWO}
    files, notes = processing_files(tokenizer)
    assert "additional_chat_templates/tool_use.jinja" in files
    out = write(tmp_path, files)
    assert load(out).chat_template == tokenizer.chat_template
    assert stored_templates(out) == {
        "tokenizer_config.json": tokenizer.chat_template,
        "chat_template.jinja": tokenizer.chat_template,
    }
    assert notes == []
    assert processing_files(load(out))[1] == []


@pytest.mark.case("V14")
def test_a_template_removed_in_training_is_absent_and_reported(tmp_path: Path) -> None:
    tokenizer = load(tokenizer_folder(tmp_path / "source", inline=None, jinja=ONE))
    tokenizer.chat_template = None
    files, notes = processing_files(tokenizer)
    assert stored_templates(write(tmp_path / "out", files)) == {}
    assert notes == [
        f"chat template: chat_template.jinja of {tmp_path / 'source'} has one, this run has none"
    ]


@pytest.mark.case("V14")
def test_added_and_special_tokens_come_along(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<tool>"])
    tokenizer.add_special_tokens({"eos_token": "<end>"})
    files, notes = processing_files(tokenizer)
    loaded = load(write(tmp_path, files))
    assert loaded.get_vocab() == tokenizer.get_vocab()
    assert loaded.special_tokens_map == tokenizer.special_tokens_map
    assert loaded.eos_token == "<end>" and loaded("<tool>").input_ids == [13]
    assert notes == []


class Broken:
    """A tokenizer whose save fails, as those with odd state do."""

    chat_template = USED

    def __init__(self, name_or_path: str) -> None:
        self.name_or_path = name_or_path

    def save_pretrained(self, directory: str) -> None:
        (Path(directory) / "tokenizer.json").write_text("half")
        raise Exception("cannot serialise the trie")


def test_a_tokenizer_that_cannot_be_saved_is_copied_from_its_source(tmp_path: Path) -> None:
    source = tokenizer_folder(tmp_path / "source", inline=ONE, jinja=None)
    (source / "special_tokens_map.json").write_text("{}")
    (source / "model.safetensors").write_bytes(b"weights")
    (source / "secrets.txt").write_text("no")
    files, notes = processing_files(Broken(str(source)))
    assert set(files) == {
        "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
        "chat_template.jinja",
    }  # fmt: skip
    assert files["tokenizer.json"] == (source / "tokenizer.json").read_bytes()
    assert files["chat_template.jinja"] == USED.encode()
    assert "Broken.save_pretrained failed (Exception: cannot serialise the trie)" in notes[0]


def test_a_tokenizer_that_can_be_neither_saved_nor_copied_is_a_note() -> None:
    files, notes = processing_files(Broken("no/such/place"))
    assert set(files) == {"chat_template.jinja"}
    assert "the checkpoint has no tokenizer files" in notes[0]


@pytest.mark.case("V14")
def test_a_processor_with_another_template_than_its_tokenizer_wins_everywhere(
    tmp_path: Path,
) -> None:
    import transformers

    class Words(transformers.ProcessorMixin):  # type: ignore[misc]
        def __init__(self, tokenizer: Any = None, chat_template: str | None = None) -> None:
            super().__init__(tokenizer, chat_template=chat_template)

    tokenizer = make_tokenizer()
    tokenizer.chat_template = ONE
    files, notes = processing_files(Words(tokenizer, chat_template=USED))
    assert "processor_config.json" in files
    assert json.loads(files["chat_template.json"]) == {"chat_template": USED}
    assert rendered_by_each_reader(write(tmp_path, files)) == {"fox é"}
    assert notes == [
        "chat template: the processor and its tokenizer have different ones; the processor's is "
        "written"
    ]


def test_nothing_is_written_outside_the_private_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    processing_files(make_tokenizer())
    assert list(scratch.iterdir()) == []
    assert [path.name for path in tmp_path.iterdir()] == ["scratch"]
