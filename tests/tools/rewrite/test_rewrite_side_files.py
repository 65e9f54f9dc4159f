"""What goes along with the weights, what stays behind, and what is said about it; the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from milepost.cli.app import make_app
from milepost.tools.reshard import reshard
from milepost.tools.rewrite.cards import Relation, RelationKind
from milepost.tools.rewrite.groups import passed
from milepost.tools.rewrite.rewrite import Rewrite
from milepost.tools.rewrite.run import run_rewrite
from milepost.tools.rewrite.source import open_source
from tests.tools.rewrite.hub import QUICK, content, read_hub, same_bits, write_hub

TENSORS = {"model.w": torch.ones(3), "mtp.0.proj.weight": torch.ones(2, 2)}


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    return write_hub(tmp_path / "in", TENSORS, config={"model_type": "x"})


@pytest.mark.case("V15")
def test_tensors_outside_the_module_graph_pass_through(hub: Path, tmp_path: Path) -> None:
    reshard(hub, tmp_path / "out", options=QUICK)
    assert same_bits(read_hub(tmp_path / "out"), TENSORS)


def test_training_state_and_weights_of_other_formats_stay_behind(hub: Path, tmp_path: Path) -> None:
    left = [
        "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", "training_args.bin",
        "pytorch_model.bin", "model.gguf", "original/consolidated.00.pth", "original/params.json",
        "metal/model.bin", "metal/config.json", "consolidated/x.json", "_cache/x.txt",
        ".git/config", "checkpoint-5/config.json",
    ]  # fmt: skip
    kept = [
        "LICENSE", "tokenizer.json", "special_tokens_map.json", "preprocessor_config.json",
        "modeling_x.py", "1_Pooling/config.json", "router_balancing_biases.pt",
    ]  # fmt: skip
    for name in (*left, *kept):
        (hub / name).parent.mkdir(exist_ok=True)
        (hub / name).write_bytes(b"content of " + name.encode())
    reshard(hub, tmp_path / "out", options=QUICK)
    made = content(tmp_path / "out")
    assert {name: made[name] for name in kept} == {n: b"content of " + n.encode() for n in kept}
    assert not made.keys() & set(left)
    manifest = json.loads(made["milepost.json"])
    assert manifest["needs"] == ["router_balancing_biases.pt"]


def test_modules_of_a_sentence_transformer_keep_their_weights(hub: Path, tmp_path: Path) -> None:
    modules = [{"idx": 0, "path": ""}, {"idx": 1, "path": "2_Dense"}]
    (hub / "modules.json").write_text(json.dumps(modules))
    for directory in ("2_Dense", "3_Other"):
        write_hub(hub / directory, {"linear.weight": torch.ones(2)}, config={"in_features": 1})
    reshard(hub, tmp_path / "out", options=QUICK)
    made = content(tmp_path / "out")
    assert {"2_Dense/model.safetensors", "2_Dense/config.json"} <= made.keys()
    assert "3_Other/model.safetensors" not in made


@pytest.mark.case("V12")
def test_a_generation_config_that_contradicts_itself_is_kept_and_noted(
    hub: Path, tmp_path: Path
) -> None:
    raw = b'{"do_sample": false, "temperature": 0.7}'
    (hub / "generation_config.json").write_bytes(raw)
    report = reshard(hub, tmp_path / "out", options=QUICK)
    assert (tmp_path / "out/generation_config.json").read_bytes() == raw
    assert any("temperature=0.7" in note for note in report.notes)


@pytest.mark.case("V13")
def test_modules_of_remote_code_go_along_and_one_that_is_not_there_is_noted(
    hub: Path, tmp_path: Path
) -> None:
    config = {"model_type": "x", "auto_map": {"AutoModel": "modeling_x.XModel"}}
    (hub / "config.json").write_text(json.dumps(config))
    report = reshard(hub, tmp_path / "without", options=QUICK)
    assert any("modeling_x" in note for note in report.notes)
    (hub / "modeling_x.py").write_text("from .helper_y import z\nraise RuntimeError('was run')\n")
    (hub / "helper_y.py").write_text("z = 1\n")
    report = reshard(hub, tmp_path / "with", options=QUICK)
    assert {"modeling_x.py", "helper_y.py"} <= content(tmp_path / "with").keys()
    assert report.notes == ()


@pytest.mark.case("V14")
def test_chat_templates_go_along_wherever_they_lie_and_a_conflict_is_noted(
    hub: Path, tmp_path: Path
) -> None:
    inline = json.dumps({"chat_template": "{{ messages }}"})
    (hub / "tokenizer_config.json").write_text(inline)
    (hub / "chat_template.jinja").write_text("{{ messages }}\n")
    assert reshard(hub, tmp_path / "same", options=QUICK).notes == ()
    (hub / "chat_template.jinja").write_text("{{ other }}")
    report = reshard(hub, tmp_path / "differ", options=QUICK)
    assert any("chat templates differ" in note for note in report.notes)
    assert (tmp_path / "differ/chat_template.jinja").read_text() == "{{ other }}"
    assert (tmp_path / "differ/tokenizer_config.json").read_text() == inline


def test_the_card_says_what_the_output_is_made_of(hub: Path, tmp_path: Path) -> None:
    from huggingface_hub import ModelCard

    (hub / "README.md").write_text("---\nlicense: mit\ntags:\n- a\n---\n# Mine\n\ntext: kept\n")
    source = open_source(hub)
    rewrite = Rewrite(
        verb="x",
        sources=[source],
        groups=[passed(tensor) for tensor in source.tensors.values()],
        relation=Relation(kind=RelationKind.MERGE, base_models=["org/one", "org/two", "/local"]),
    )
    run_rewrite(rewrite, tmp_path / "out", QUICK)
    card = ModelCard.load(tmp_path / "out/README.md")
    assert card.data.base_model == ["org/one", "org/two"]
    assert card.data.to_dict()["base_model_relation"] == "merge"
    assert card.data.tags == ["a", "milepost"] and card.data.license == "mit"
    assert card.text.strip() == "# Mine\n\ntext: kept"


def run(*arguments: object) -> Any:
    return CliRunner().invoke(make_app(), [str(argument) for argument in arguments])


def test_the_command_takes_both_spellings_and_answers_as_text_and_json(
    hub: Path, tmp_path: Path
) -> None:
    done = run("cast", "--input_dir", hub, "--output_dir", tmp_path / "a", "--dtype", "bf16")
    assert done.exit_code == 0 and "wrote" in done.stdout
    done = run("cast", f"--input-dir={hub}", f"--output_dir={tmp_path / 'b'}", "--dtype=bf16",
               "--max_shard_size", "1KB", "--json", "--quiet")  # fmt: skip
    document = json.loads(done.stdout)
    assert document["tensors"] == 2 and document["unchanged"] == 0
    assert same_bits(read_hub(tmp_path / "a"), read_hub(tmp_path / "b"))


def test_problems_of_a_dry_run_are_a_finding_and_those_of_a_run_are_refused(
    hub: Path, tmp_path: Path
) -> None:
    asked = ("cast", "--input-dir", hub, "--output-dir", hub, "--dtype", "bf16")
    dry = run(*asked, "--dry-run")
    assert dry.exit_code == 1 and "problem: " in dry.stdout
    refused = run(*asked)
    assert refused.exit_code == 5 and refused.stderr.startswith("error: ")
    assert run("cast", "--input-dir", hub).exit_code == 2
    assert run(*asked[:3], "--output-dir", tmp_path / "x", "--dtype", "int4").exit_code == 5


def test_a_command_for_experts_and_one_for_sinks_are_there(hub: Path, tmp_path: Path) -> None:
    for verb in ("unfuse-moe-experts", "fuse-moe-experts", "reset-sinks", "convert-to-bf16"):
        done = run(verb, "--input-dir", hub, "--output-dir", tmp_path / verb)
        assert done.exit_code == 0, done.stderr
    assert run("merge-ep-shards", "--input-dir", hub, "--output-dir", tmp_path / "m").exit_code == 5
    rule = ("rename", "--input-dir", hub, "--output-dir", tmp_path / "r", "--rule")
    assert run(*rule, "^model=>backbone").exit_code == 0
    assert "backbone.w" in read_hub(tmp_path / "r")
    assert run(*rule, "no arrow").exit_code == 5
