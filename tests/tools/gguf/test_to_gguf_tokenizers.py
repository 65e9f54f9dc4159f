"""Tokenizers in GGUF files make the tokens that they make in a directory."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, LlamaTokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
from transformers.tokenization_utils_base import generate_merges

from milepost.errors import InvalidInputError
from milepost.tools.gguf.byte_level import LLAMA3_SPLIT, QWEN2_SPLIT, pre_tokenizer_name
from milepost.tools.gguf.token_table import TokenTable, TokenType
from milepost.tools.gguf.tokenizer import tokenizer_keys
from tests.tools.gguf.gguf_models import (
    LINES,
    LLAMA_ROWS,
    ROWS,
    TEMPLATE,
    keys_of,
    llama_tokenizer,
    qwen_tokenizer,
    tiny,
    write,
)

Edit = Callable[[dict[str, Any]], Any]


def edit(path: Path, change: Edit) -> None:
    document = json.loads(path.read_bytes())
    change(document)
    path.write_text(json.dumps(document), encoding="utf-8")


def test_a_byte_level_tokenizer_comes_back_through_transformers(tmp_path: Path) -> None:
    tiny("qwen2", tmp_path / "model")
    write(tmp_path / "model", tmp_path / "out" / "m.gguf", "q8_0")
    before = qwen_tokenizer()
    after = AutoTokenizer.from_pretrained(tmp_path / "out", gguf_file="m.gguf")
    for line in [*LINES, "<think>hm</think><|endoftext|>"]:
        ids = before(line)["input_ids"]
        assert after(line)["input_ids"] == ids and after.decode(ids) == before.decode(ids)
    assert after.chat_template == TEMPLATE
    assert after.eos_token_id == before.eos_token_id
    keys = keys_of(tmp_path / "out" / "m.gguf")
    assert keys["tokenizer.ggml.pre"] == "qwen2"
    assert len(keys["tokenizer.ggml.tokens"]) == len(keys["tokenizer.ggml.token_type"]) == ROWS
    types = dict(zip(keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.token_type"], strict=True))
    assert types["<|endoftext|>"] == TokenType.CONTROL
    assert types["<think>"] == TokenType.USER_DEFINED
    assert types[f"[PAD{ROWS - 1}]"] == TokenType.UNUSED
    assert keys["tokenizer.ggml.add_bos_token"] is False


def with_llama_tokenizer(directory: Path) -> Path:
    tiny("llama", directory, vocab_size=LLAMA_ROWS, bos_token_id=1, eos_token_id=2)
    (directory / "chat_template.jinja").unlink()
    llama_tokenizer().save_pretrained(directory)
    return directory


def test_a_sentencepiece_tokenizer_comes_back_through_transformers(tmp_path: Path) -> None:
    with_llama_tokenizer(tmp_path / "model")
    write(tmp_path / "model", tmp_path / "out" / "m.gguf", "f16")
    before = AutoTokenizer.from_pretrained(tmp_path / "model")
    after = AutoTokenizer.from_pretrained(tmp_path / "out", gguf_file="m.gguf")
    for line in LINES:
        ids = before(line)["input_ids"]
        assert len(ids) > 5 and after(line)["input_ids"] == ids
    keys = keys_of(tmp_path / "out" / "m.gguf")
    assert keys["tokenizer.ggml.model"] == "llama" and keys["tokenizer.ggml.add_space_prefix"]
    assert keys["tokenizer.ggml.add_bos_token"] is True
    assert (keys["tokenizer.ggml.bos_token_id"], keys["tokenizer.ggml.eos_token_id"]) == (1, 2)
    types = keys["tokenizer.ggml.token_type"]
    assert types[0] == TokenType.UNKNOWN and types[1] == TokenType.CONTROL
    assert types.count(int(TokenType.BYTE)) == 256


def test_merges_that_scores_cannot_say_are_refused(tmp_path: Path) -> None:
    llama_tokenizer().save_pretrained(tmp_path)
    pieces = tmp_path / "tokenizer.json"
    original = pieces.read_bytes()

    def drop(document: dict[str, Any]) -> None:
        document["model"]["merges"].pop()

    def part(document: dict[str, Any]) -> None:
        merges = document["model"]["merges"]
        joined = ["".join(pair) for pair in merges]
        twice = next(i for i in range(1, len(joined)) if joined[i] == joined[i - 1])
        merges.append(merges.pop(twice))

    for change, message in ((drop, "does not merge"), (part, "different rank")):
        pieces.write_bytes(original)
        edit(pieces, change)
        with pytest.raises(InvalidInputError, match=message):
            tokenizer_keys(tmp_path, {}, LLAMA_ROWS)


def test_names_of_cuts_are_those_under_which_transformers_cuts_in_the_same_way() -> None:
    assert GGUF_PRE_TOKENIZER_SPLITS["llama-bpe"] == LLAMA3_SPLIT
    assert GGUF_PRE_TOKENIZER_SPLITS["qwen2"] == QWEN2_SPLIT


def byte_level(**settings: Any) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True, **settings}


def split(pattern: str) -> dict[str, Any]:
    return {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }


def sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(steps)}


def test_the_cut_of_a_tokenizer_is_told_by_its_declaration() -> None:
    table = TokenTable(Path("tokenizer.json"), 1)
    digits = {"type": "Digits", "individual_digits": True}
    for declared, name in (
        (byte_level(), "gpt-2"),
        (sequence(digits, byte_level()), "smollm"),
        (sequence(split(LLAMA3_SPLIT), byte_level(use_regex=False)), "llama-bpe"),
        (sequence(split(QWEN2_SPLIT), byte_level(use_regex=False)), "qwen2"),
    ):
        assert pre_tokenizer_name({"pre_tokenizer": declared}, table) == name
    for unknown in (
        None,
        sequence(split(r"\p{L}+"), byte_level(use_regex=False)),
        sequence(split(QWEN2_SPLIT)),
        byte_level(add_prefix_space=True),
        byte_level(use_regex=False),
    ):
        with pytest.raises(InvalidInputError, match="cuts text in a way"):
            pre_tokenizer_name({"pre_tokenizer": unknown}, table)


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_tokenizer_model_is_read_as_sentencepiece_reads_it(kind: str, tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES * 20),
        model_writer=model,
        model_type=kind,
        vocab_size=330 if kind == "bpe" else 60,
        byte_fallback=kind == "bpe",
        normalization_rule_name="identity",
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (tmp_path / "tokenizer.model").write_bytes(model.getvalue())
    added = {"500": {"content": "<tool>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": "</s>", "added_tokens_decoder": added})
    )
    keys: dict[str, Any] = tokenizer_keys(tmp_path, {}, 512).keys
    oracle = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    count = oracle.get_piece_size()
    assert keys["tokenizer.ggml.model"] == ("llama" if kind == "bpe" else "t5")
    pieces = [oracle.id_to_piece(number) for number in range(count)]
    assert keys["tokenizer.ggml.tokens"][:count] == pieces
    assert keys["tokenizer.ggml.scores"][:count] == [oracle.get_score(n) for n in range(count)]
    types = keys["tokenizer.ggml.token_type"]
    for number in range(count):
        assert (types[number] == TokenType.BYTE) == oracle.is_byte(number)
        assert (types[number] == TokenType.CONTROL) == oracle.is_control(number)
        assert (types[number] == TokenType.UNKNOWN) == oracle.is_unknown(number)
    assert keys["tokenizer.ggml.tokens"][500] == "<tool>" and types[500] == TokenType.CONTROL
    assert keys["tokenizer.ggml.bos_token_id"] == oracle.bos_id()
    assert keys["tokenizer.ggml.add_bos_token"] and not keys["tokenizer.ggml.add_eos_token"]


def test_merges_that_transformers_makes_of_scores_become_scores_of_the_same_order(
    tmp_path: Path,
) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES * 20),
        model_writer=model,
        model_type="bpe",
        vocab_size=400,
        byte_fallback=True,
        normalization_rule_name="identity",
        minloglevel=2,
    )
    oracle = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    pieces = [oracle.id_to_piece(number) for number in range(oracle.get_piece_size())]
    vocab = {text: number for number, text in enumerate(pieces)}
    given = {text: oracle.get_score(number) for text, number in vocab.items()}
    merges = generate_merges(vocab, given)
    LlamaTokenizer(vocab=vocab, merges=merges).save_pretrained(tmp_path)
    keys: dict[str, Any] = tokenizer_keys(tmp_path, {}, len(pieces)).keys
    found = dict(zip(pieces, keys["tokenizer.ggml.scores"], strict=True))
    made = {left + right for left, right, *_ in merges}
    assert len(made) > 50
    assert sorted(made, key=found.__getitem__) == sorted(made, key=given.__getitem__)
    assert max(found[text] for text in pieces if len(text) == 1) < min(found[t] for t in made)


def test_a_unigram_tokenizer_goes_in_with_its_scores_and_one_with_bytes_does_not(
    tmp_path: Path,
) -> None:
    vocab = [["<unk>", 0.0], ["\u2581", -2.0], ["\u2581a", -3.5], ["a", -4.0]]
    document: dict[str, Any] = {
        "added_tokens": [{"id": 0, "content": "<unk>", "special": True}],
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAECAw=="},
        "pre_tokenizer": {
            "type": "Metaspace",
            "replacement": "\u2581",
            "prepend_scheme": "always",
            "split": True,
        },
        "model": {"type": "Unigram", "unk_id": 0, "vocab": vocab, "byte_fallback": False},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    keys: dict[str, Any] = tokenizer_keys(tmp_path, {}, 5).keys
    assert keys["tokenizer.ggml.model"] == "t5"
    assert keys["tokenizer.ggml.scores"] == [0.0, -2.0, -3.5, -4.0, 0.0]
    assert keys["tokenizer.ggml.token_type"] == [2, 1, 1, 1, 5]
    assert keys["tokenizer.ggml.precompiled_charsmap"] == bytes(range(4))
    assert keys["tokenizer.ggml.add_space_prefix"] is True
    document["model"]["byte_fallback"] = True
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(InvalidInputError, match="Unigram model with byte fallback"):
        tokenizer_keys(tmp_path, {}, 5)


def test_a_text_starts_with_a_token_where_the_tokenizer_puts_one(tmp_path: Path) -> None:
    qwen_tokenizer().save_pretrained(tmp_path)

    def starts(document: dict[str, Any]) -> None:
        start = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
        text = {"Sequence": {"id": "A", "type_id": 0}}
        document["post_processor"] = {"type": "TemplateProcessing", "single": [start, text]}

    edit(tmp_path / "tokenizer.json", starts)
    edit(tmp_path / "tokenizer_config.json", lambda c: c.update(bos_token="<|endoftext|>"))
    keys = tokenizer_keys(tmp_path, {}, ROWS).keys
    assert keys["tokenizer.ggml.add_bos_token"] is True
    assert keys["tokenizer.ggml.add_eos_token"] is False


def test_several_chat_templates_go_along(tmp_path: Path) -> None:
    tiny("qwen2", tmp_path / "model")
    (tmp_path / "model/additional_chat_templates").mkdir()
    (tmp_path / "model/additional_chat_templates/tool_use.jinja").write_text("{{ tools }}")
    write(tmp_path / "model", tmp_path / "m.gguf", "q8_0")
    keys = keys_of(tmp_path / "m.gguf")
    assert keys["tokenizer.chat_template"] == TEMPLATE
    assert keys["tokenizer.chat_template.tool_use"] == "{{ tools }}"


def test_tokenizers_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    qwen_tokenizer().save_pretrained(tmp_path / "full")

    def ids(document: dict[str, Any]) -> None:
        document["added_tokens"][0]["id"] = 5

    for name, change, size, message in (
        ("rows", lambda d: None, 100, "embedding has 100 rows"),
        ("ids", ids, ROWS, "id 5 is"),
        ("words", lambda d: d["model"].update(type="WordPiece"), ROWS, "a WordPiece model"),
        ("lower", lambda d: d.update(normalizer={"type": "Lowercase"}), ROWS, "normalises text"),
    ):
        shutil.copytree(tmp_path / "full", tmp_path / name)
        edit(tmp_path / name / "tokenizer.json", change)
        with pytest.raises(InvalidInputError, match=message):
            tokenizer_keys(tmp_path / name, {}, size)
    (tmp_path / "none").mkdir()
    with pytest.raises(InvalidInputError, match="and a GGUF file needs its tokenizer"):
        tokenizer_keys(tmp_path / "none", {}, ROWS)
