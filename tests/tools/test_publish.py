"""Publishing: over real HTTP to a small Hub that speaks what huggingface_hub asks for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import constants
from huggingface_hub.utils._http import close_session
from safetensors.torch import save_file

import milepost as mp
from milepost.errors import DamagedError, FormatError, InvalidInputError, PublishError
from milepost.format.manifest import encode_manifest
from milepost.layouts.directory import DirectoryCheckpoint
from milepost.tools import publish_upload
from tests.hf.conftest import make_model, make_tokenizer
from tests.tools.hub_server import Hub, serving

# What huggingface_hub and peft warn about among themselves.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Could not find a config file:UserWarning"),
]

REPO = "someone/small-model"
MODEL_FILES = {"README.md", "config.json", "generation_config.json", "model.safetensors"}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub on this machine; huggingface_hub takes plain LFS to it, and waits are short."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(publish_upload, "_FIRST_WAIT_S", 0.01)
    with serving() as server:
        yield server
    close_session()


def push(path: Path, hub: Hub, **keywords: Any) -> mp.PublishReport:
    return mp.publish(path, REPO, endpoint=hub.url, token="hf_secret", **keywords)


def checkpoint(path: Path, **keywords: Any) -> Path:
    """A training checkpoint with everything that must not be published by default."""
    model = make_model("llama")
    optimizer = torch.optim.AdamW(model.parameters())
    model(input_ids=torch.arange(8)[None]).logits.sum().backward()
    optimizer.step()
    place = path / "checkpoint-7"
    keywords.setdefault("processing_class", make_tokenizer())
    state = {"model": model, "optimizer": optimizer, "ema": make_model("llama")}
    mp.save(place, state, step=7, primary="model", metrics={"loss": 0.5}, **keywords)
    return place


def metadata(card: bytes) -> dict[str, Any]:
    _, block, _ = card.decode().split("---\n", 2)
    found: dict[str, Any] = yaml.safe_load(block)
    return found


def test_weights_go_to_the_hub_in_one_commit_and_nothing_of_training_does(
    hub: Hub, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = checkpoint(tmp_path)
    report = push(path, hub, message="first")
    repo = hub.repos[REPO]
    assert len(repo.commits) == 1 and repo.commits[0]["summary"] == "first"
    assert hub.tokens == {"Bearer hf_secret"}
    assert repo.files.keys() >= MODEL_FILES and repo.files.keys() == set(report.files)
    assert not [n for n in repo.files if n.startswith(("training/", "ema/", "milepost", "."))]
    assert "trainer_state.json" not in repo.files
    assert report.nbytes == sum(len(data) for data in repo.files.values())
    assert report.commit and report.url and report.url.endswith(report.commit)
    assert repo.files["model.safetensors"] == (path / "model.safetensors").read_bytes()

    downloaded = tmp_path / "downloaded"
    for name, data in repo.files.items():
        place = downloaded / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)
    loaded = AutoModelForCausalLM.from_pretrained(downloaded)
    assert AutoTokenizer.from_pretrained(downloaded)("quick")["input_ids"]
    saved = mp.Checkpoint.open(path).read_weights()
    assert all(torch.equal(t, loaded.state_dict()[n]) for n, t in saved.items())


def test_what_huggingface_hub_downloads_opens_as_a_checkpoint(hub: Hub, tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    push(path, hub)
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    for name, data in hub.repos[REPO].files.items():  # a cache of the Hub consists of symlinks
        blob = blobs / hashlib.sha256(data).hexdigest()
        blob.write_bytes(data)
        (snapshot / name).symlink_to(blob)
    opened = mp.Checkpoint.open(snapshot)
    assert opened.verify().ok
    assert opened.tensors().keys() == mp.Checkpoint.open(path).tensors().keys()


def test_a_dry_run_lists_everything_and_contacts_nothing(hub: Hub, tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    planned = push(path, hub, mode=mp.PublishMode.DRY_RUN)
    assert hub.requests == [] and planned.commit is None
    done = push(path, hub)
    assert planned.files == done.files == {n: len(d) for n, d in hub.repos[REPO].files.items()}


def test_the_card_says_where_the_model_comes_from_and_names_no_path(
    hub: Hub, tmp_path: Path
) -> None:
    path = checkpoint(tmp_path)
    push(path, hub, base_model="org/base")
    card = hub.repos[REPO].files["README.md"]
    found = metadata(card)
    assert found["tags"] == ["milepost"]
    assert (found["base_model"], found["base_model_relation"]) == ("org/base", "finetune")
    assert found["library_name"] == "transformers"
    origin = found["milepost"]
    assert origin["checkpoint"] == mp.Checkpoint.open(path).info.checkpoint_id
    assert (origin["step"], origin["metrics"]) == (7, {"loss": 0.5})
    assert "# small-model" in card.decode() and "org/base (finetune)" in card.decode()
    host = mp.Checkpoint.open(path).info.extra["provenance"]["host"]
    for secret in (str(tmp_path), host, "pytest"):
        assert secret not in card.decode()
    again = metadata(hub.repos[REPO].files["README.md"])
    push(path, hub)
    assert metadata(hub.repos[REPO].files["README.md"]).keys() <= again.keys()


def test_a_card_that_is_there_keeps_its_keys_comments_and_body(hub: Hub, tmp_path: Path) -> None:
    path = foreign(tmp_path / "m")
    text = (
        "---\n# mine\nlicense: mit  # ours\ntags: [a]\nbase_model: org/own\n---\n# Title\n\nText.\n"
    )
    (path / "README.md").write_text(text)
    push(path, hub, base_model="org/other", relation=mp.BaseModelRelation.MERGE)
    card = hub.repos[REPO].files["README.md"].decode()
    assert card.startswith("---\n# mine\nlicense: mit  # ours\ntags: [a, milepost]\n")
    assert card.endswith("---\n# Title\n\nText.\n")
    found = metadata(card.encode())
    assert (found["base_model"], found["base_model_relation"]) == ("org/own", "merge")


def foreign(path: Path, **config: Any) -> Path:
    """A Hugging Face directory that Milepost did not write, with leftovers of a trainer."""
    path.mkdir(parents=True)
    save_file({"w": torch.ones(3)}, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    for name in ("optimizer.pt", "rng_state.pth", "scheduler.pt", "training_args.bin",
                 "trainer_state.json", "_scratch.json", ".gitattributes", "resume_adapter.json",
                 "reference_logps.pt"):  # fmt: skip
        (path / name).write_bytes(b"{}")
    (path / "_logs").mkdir()
    (path / "_logs" / "events.json").write_bytes(b"{}")
    (path / "checkpoint-3").mkdir()
    (path / "checkpoint-3" / "config.json").write_bytes(b"{}")
    return path


def test_leftovers_of_a_trainer_and_underscored_names_stay_here(hub: Hub, tmp_path: Path) -> None:
    report = push(foreign(tmp_path / "m"), hub)
    assert set(report.files) == {"README.md", "config.json", "model.safetensors"}
    assert "no digests are recorded" in " ".join(report.notes)


def test_the_modules_of_a_sentence_transformer_bring_their_weights(
    hub: Hub, tmp_path: Path
) -> None:
    path = foreign(tmp_path / "m")
    (path / "2_Dense").mkdir()
    save_file({"linear.weight": torch.ones(2, 2)}, path / "2_Dense" / "model.safetensors")
    (path / "2_Dense" / "config.json").write_bytes(b"{}")
    modules = [{"idx": 0, "path": ""}, {"idx": 1, "path": "2_Dense"}]
    (path / "modules.json").write_text(json.dumps(modules))
    report = push(path, hub)
    assert {"2_Dense/model.safetensors", "2_Dense/config.json", "modules.json"} <= set(report.files)


@pytest.mark.parametrize("base", ["org/base", "/data/models/base"])
def test_an_adapter_names_its_base_unless_that_is_a_path(
    base: str, hub: Hub, tmp_path: Path
) -> None:
    import peft

    model = peft.get_peft_model(make_model("llama"), peft.LoraConfig(target_modules=["q_proj"]))
    model.peft_config["default"].base_model_name_or_path = base
    model.save_pretrained(tmp_path / "a")
    report = push(tmp_path / "a", hub)
    card = hub.repos[REPO].files["README.md"].decode()
    found = metadata(card.encode())
    assert {"adapter_model.safetensors", "adapter_config.json"} <= set(report.files)
    assert found["library_name"] == "peft"
    if base.startswith("/"):
        assert "base_model" not in found and "/data" not in card
        assert "is no model of the Hub" in " ".join(report.notes)
    else:
        assert (found["base_model"], found["base_model_relation"]) == (base, "adapter")


def test_training_state_goes_along_when_asked_and_resumes(hub: Hub, tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    push(path, hub, training_state=mp.TrainingState.INCLUDE, base_model="org/base")
    out = tmp_path / "run" / "checkpoint-7"
    for name, data in hub.repos[REPO].files.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_bytes(data)
    report = mp.Checkpoint.open(out).verify()
    assert report.ok and not report.problems
    assert mp.newest(tmp_path / "run") is not None
    model = make_model("llama")
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer, "ema": make_model("llama")}
    loaded = mp.load(out, state)
    assert loaded.level is mp.Level.EXACT
    ours, theirs = mp.Checkpoint.open(out).info, mp.Checkpoint.open(path).info
    assert ours.checkpoint_id == theirs.checkpoint_id


def test_weights_that_loaders_would_take_instead_are_removed_in_the_same_commit(
    hub: Hub, tmp_path: Path
) -> None:
    whole = checkpoint(tmp_path / "a")
    push(whole, hub)
    repo = hub.repos[REPO]
    repo.files.update(
        {"adapter_model.safetensors": b"", "adapter_config.json": b"{}", "my.txt": b""}
    )
    parts = checkpoint(tmp_path / "b", max_shard_size="4KB")
    report = push(parts, hub)
    assert set(report.removed) == {
        "model.safetensors", "adapter_model.safetensors", "adapter_config.json"
    }  # fmt: skip
    assert "my.txt" in repo.files and "model.safetensors.index.json" in repo.files
    assert len(repo.commits) == 2
    kept = push(whole, hub, stale=mp.StaleWeights.KEEP)
    assert kept.removed == () and "model.safetensors.index.json" in repo.files


def test_a_busy_hub_is_asked_again_and_the_commit_is_made_once(hub: Hub, tmp_path: Path) -> None:
    hub.busy[("POST", "/commit/")] = [503, 503]
    hub.busy[("POST", "/repos/create")] = [500]
    push(checkpoint(tmp_path), hub)
    assert len(hub.repos[REPO].commits) == 1 and hub.count("POST .*/commit/main") == 3
    assert hub.count("PUT /lfs/") == 1, "what was uploaded is not uploaded again"


def test_publishing_the_same_again_commits_nothing(hub: Hub, tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    first = push(path, hub)
    second = push(path, hub)
    assert len(hub.repos[REPO].commits) == 1 and second.files == first.files


def test_a_hub_that_refuses_is_reported_with_its_status_and_changes_nothing(
    hub: Hub, tmp_path: Path
) -> None:
    path = checkpoint(tmp_path)
    push(path, hub)
    before = dict(hub.repos[REPO].files)
    hub.busy[("POST", "/commit/")] = [403]
    with pytest.raises(PublishError, match=r"could not commit.*may not write there") as raised:
        push(checkpoint(tmp_path / "b", max_shard_size="4KB"), hub)
    assert raised.value.status == 403 and hub.repos[REPO].files == before
    hub.readme_errors.append("license is unknown")
    with pytest.raises(PublishError, match="license is unknown"):
        push(checkpoint(tmp_path / "c", max_shard_size="8KB"), hub)
    hub.readme_errors.clear()
    hub.busy[("POST", "/commit/")] = [503] * 9
    with pytest.raises(PublishError) as raised:
        push(checkpoint(tmp_path / "d", max_shard_size="8KB"), hub, attempts=2)
    assert raised.value.status == 503 and hub.repos[REPO].files == before


def test_a_hub_that_is_not_there_is_an_error_of_publishing(tmp_path: Path, hub: Hub) -> None:
    with pytest.raises(PublishError, match="could not create the repository") as raised:
        mp.publish(checkpoint(tmp_path), REPO, endpoint="http://127.0.0.1:9", attempts=1)
    assert raised.value.status is None


def test_private_branches_and_pull_requests(hub: Hub, tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    push(path, hub, visibility=mp.Visibility.PRIVATE)
    assert hub.repos[REPO].private
    push(checkpoint(tmp_path / "b", max_shard_size="8KB"), hub, revision="step-7")
    repo = hub.repos[REPO]
    assert "model.safetensors" in repo.files
    assert "model.safetensors" not in repo.branches["step-7"]
    main = dict(repo.files)
    other = checkpoint(tmp_path / "c", max_shard_size="4KB")
    report = push(other, hub, to=mp.PublishTo.PULL_REQUEST)
    assert report.pull_request and repo.files == main
    assert "refs/pr/2" in repo.branches


def test_private_is_refused_for_a_repository_that_is_public(hub: Hub, tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    push(path, hub)
    commits = len(hub.repos[REPO].commits)
    with pytest.raises(PublishError, match="already and public"):
        push(path, hub, visibility=mp.Visibility.PRIVATE)
    assert len(hub.repos[REPO].commits) == commits


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(bytes(raw))


def test_what_is_torn_changed_or_lacks_a_sidecar_is_refused_before_the_hub_hears_of_it(
    hub: Hub, tmp_path: Path
) -> None:
    changed = checkpoint(tmp_path / "a")
    flip(changed / "model.safetensors")
    with pytest.raises(DamagedError, match=r"model\.safetensors.*nothing was published"):
        push(changed, hub)
    cut = checkpoint(tmp_path / "b")
    (cut / "model.safetensors").write_bytes((cut / "model.safetensors").read_bytes()[:-8])
    with pytest.raises(DamagedError, match="cut short"):
        push(cut, hub, verify=mp.Verify.SIZES)
    lacking = checkpoint(tmp_path / "c")
    handle = DirectoryCheckpoint(lacking)
    handle.manifest.needs = ["router_balancing_biases.pt"]
    (lacking / "milepost.json").write_bytes(encode_manifest(handle.manifest))
    with pytest.raises(InvalidInputError, match=r"need router_balancing_biases\.pt"):
        push(lacking, hub)
    incomplete = foreign(tmp_path / "d")
    (incomplete / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {"w": "model-00001-of-00002.safetensors"}}
    (incomplete / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(DamagedError, match="parts are missing"):
        push(incomplete, hub)
    torn = tmp_path / "e" / "checkpoint-9"
    torn.mkdir(parents=True)
    with pytest.raises(mp.errors.NotCommittedError):
        push(torn, hub)
    single = tmp_path / "x.pt"
    torch.save({"w": torch.ones(1)}, single)
    with pytest.raises(InvalidInputError, match="milepost export"):
        push(single, hub)
    assert hub.requests == []


def test_sizes_alone_may_be_asked_for(hub: Hub, tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    flip(path / "model.safetensors")
    push(path, hub, verify=mp.Verify.SIZES)
    flip(path / "training" / "optimizer.safetensors")
    flip(path / "model.safetensors")
    push(path, hub)  # damage in what is not published is no reason


def test_slices_per_rank_are_refused_with_the_command_that_merges_them(
    hub: Hub, tmp_path: Path
) -> None:
    path = foreign(tmp_path / "m")
    (path / "model.safetensors").unlink()
    name = "model-00000-of-00001.safetensors"
    save_file({"model.layers.0.mlp.experts.down_proj.shard_0": torch.ones(2)}, path / name)
    index = {
        "metadata": {"format": "ep_sharded", "ep_size": 1, "total_size": 8},
        "weight_map": {"model.layers.0.mlp.experts.down_proj.shard_0": name},
    }
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(FormatError, match="milepost merge-ep-shards"):
        push(path, hub)


@pytest.mark.parametrize("repo", ["", "/abs/path", "a/b/c", "../x", "a b/c", "x" * 97])
def test_a_name_that_no_repository_has_is_refused(repo: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="OWNER/NAME"):
        mp.publish(tmp_path, repo)


def test_a_base_that_is_a_path_is_refused(tmp_path: Path) -> None:
    path = foreign(tmp_path / "m")
    with pytest.raises(InvalidInputError, match="means nothing to others"):
        mp.publish(path, REPO, base_model=str(tmp_path), mode=mp.PublishMode.DRY_RUN)


def test_sidecars_that_the_weights_need_are_published_with_them(hub: Hub, tmp_path: Path) -> None:
    biases = {"router_balancing_biases.pt": {"model.layers.0.mlp.gate": torch.ones(4)}}
    report = push(checkpoint(tmp_path, sidecars=biases), hub)
    assert "router_balancing_biases.pt" in report.files


def test_an_adapter_that_milepost_saved_loads_with_peft(hub: Hub, tmp_path: Path) -> None:
    import peft

    base = make_model("llama")
    base.save_pretrained(tmp_path / "base")
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"]))
    mp.save(tmp_path / "checkpoint-1", {"model": model}, step=1)
    report = push(tmp_path / "checkpoint-1", hub, base_model="org/base")
    assert {"adapter_model.safetensors", "adapter_config.json"} <= set(report.files)
    assert "model.safetensors" not in report.files
    found = metadata(hub.repos[REPO].files["README.md"])
    assert (found["base_model_relation"], found["library_name"]) == ("adapter", "peft")
    out = tmp_path / "downloaded"
    out.mkdir()
    for name, data in hub.repos[REPO].files.items():
        (out / name).write_bytes(data)
    loaded = peft.PeftModel.from_pretrained(make_model("llama"), out)
    ours, theirs = (peft.get_peft_model_state_dict(each) for each in (model, loaded))
    assert ours and all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
