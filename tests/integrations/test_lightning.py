"""Lightning trains, saves and resumes through Milepost: exactly, and without a pickle."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

import milepost as mp
from milepost.errors import (
    DamagedError,
    InvalidInputError,
    KeyMismatchError,
    LoadTornError,
    UnencodableError,
)
from tests.states import same
from tests.worlds import run_world

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning advises about the size of machines

import lightning.pytorch as pl  # noqa: E402
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402
from lightning.pytorch.plugins.environments import ClusterEnvironment  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy  # noqa: E402

from milepost.integrations.lightning import (  # noqa: E402
    MilepostCheckpointIO,
    MilepostRandomState,
    MilepostStrategy,
    load_from_checkpoint,
)


class Small(pl.LightningModule):  # type: ignore[misc]
    """Dropout and shuffling draw from the global generators; the schedule has a state."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.save_hyperparameters(settings)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 4))

    def training_step(self, batch: Any, _: int) -> Any:
        return (self.net(batch[0]) - batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)]

    def train_dataloader(self) -> Any:
        data = torch.arange(64.0).reshape(16, 4) / 64
        return DataLoader(TensorDataset(data), batch_size=2, shuffle=True)


def trainer(path: Path, epochs: int, **keywords: Any) -> pl.Trainer:
    keep = ModelCheckpoint(path, filename="{epoch}", save_top_k=-1, every_n_epochs=1)
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "plugins": [MilepostCheckpointIO()],
        "callbacks": [keep, MilepostRandomState()],
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": path,
    }
    return pl.Trainer(max_epochs=epochs, **{**defaults, **keywords})


def fit(
    path: Path, epochs: int, *, resume: Path | None = None, seed: int = 0, **keywords: Any
) -> Any:
    """The trainer after training a new module, from the checkpoint `resume` on."""
    torch.manual_seed(seed)
    module = keywords.pop("module", Small)()
    made = trainer(path, epochs, **keywords)
    made.fit(module, ckpt_path=None if resume is None else str(resume), weights_only=False)
    return made


def state_of(made: pl.Trainer) -> dict[str, Any]:
    optimizer = made.optimizers[0].state_dict()
    weights = {name: tensor.clone() for name, tensor in made.lightning_module.state_dict().items()}
    return {"weights": weights, "optimizer": optimizer, "step": made.global_step}


def test_a_run_that_is_resumed_ends_with_the_bits_of_one_that_never_stopped(
    tmp_path: Path,
) -> None:
    whole = state_of(fit(tmp_path / "whole", 4))
    fit(tmp_path / "cut", 2)
    resumed = fit(tmp_path / "cut", 4, resume=tmp_path / "cut" / "epoch=1.ckpt", seed=9)
    assert same(state_of(resumed), whole)
    assert not same(state_of(fit(tmp_path / "other", 4, seed=9))["weights"], whole["weights"])


class Resumable(Small):
    """The loader tells where it stands, so that a save within an epoch is exact too."""

    def train_dataloader(self) -> Any:
        from torchdata.stateful_dataloader import StatefulDataLoader

        data = torch.arange(64.0).reshape(16, 4) / 64
        return StatefulDataLoader(TensorDataset(data), batch_size=2, shuffle=True)


def test_a_save_within_an_epoch_resumes_exactly_with_a_loader_that_has_a_state(
    tmp_path: Path,
) -> None:
    def callbacks(path: Path) -> list[Any]:
        keep = ModelCheckpoint(path, filename="{step}", save_top_k=-1, every_n_train_steps=5)
        return [keep, MilepostRandomState()]

    def run(where: str, **keywords: Any) -> Any:
        path = tmp_path / where
        return fit(path, 3, module=Resumable, callbacks=callbacks(path), **keywords)

    whole = state_of(run("whole"))
    resumed = run("cut", resume=tmp_path / "whole" / "step=10.ckpt", seed=9)
    assert same(state_of(resumed), whole)


def test_a_checkpoint_is_a_directory_without_a_pickle_that_verifies(tmp_path: Path) -> None:
    made = fit(tmp_path, 1)
    path = tmp_path / "epoch=0.ckpt"
    files = [place for place in path.rglob("*") if place.is_file()]
    assert files and not any(zipfile.is_zipfile(place) for place in files)
    assert {place.suffix for place in files if place.name != "digests.bin"} == {
        ".safetensors", ".json"
    }  # fmt: skip
    opened = mp.Checkpoint.open(path)
    assert opened.verify().ok and opened.info.step == made.global_step == 8
    assert same(dict(opened.read_weights()), dict(made.lightning_module.state_dict()))


def test_hyper_parameters_that_only_a_pickle_could_hold_are_refused_by_name(
    tmp_path: Path,
) -> None:
    with pytest.raises(UnencodableError, match=r"hyper_parameters.*model"):
        fit(tmp_path, 1, module=lambda: Small(model=nn.Linear(1, 1)))
    assert not list(tmp_path.glob("*.ckpt"))
    fit(tmp_path, 1, module=lambda: Small(width=8, betas=(0.9, 0.95)))
    loaded = MilepostCheckpointIO().load_checkpoint(tmp_path / "epoch=0.ckpt")
    assert loaded["hyper_parameters"] == {"width": 8, "betas": (0.9, 0.95)}


def test_a_checkpoint_of_stock_lightning_resumes(tmp_path: Path) -> None:
    stock = [ModelCheckpoint(tmp_path / "stock", filename="{epoch}", save_top_k=-1)]
    fit(tmp_path / "stock", 2, plugins=[], callbacks=stock)
    path = tmp_path / "stock" / "epoch=1.ckpt"
    assert path.is_file()
    with_stock = state_of(fit(tmp_path / "a", 3, resume=path, seed=5, plugins=[], callbacks=[]))
    with_ours = state_of(fit(tmp_path / "b", 3, resume=path, seed=5, callbacks=[]))
    assert same(with_ours, with_stock)


def test_what_lightning_removes_is_gone_and_what_it_keeps_is_whole(tmp_path: Path) -> None:
    fit(tmp_path, 3, callbacks=[ModelCheckpoint(tmp_path, filename="{epoch}")])
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["epoch=2.ckpt"]
    assert mp.Checkpoint.open(tmp_path / "epoch=2.ckpt").verify().ok
    io = MilepostCheckpointIO()
    (tmp_path / "last.ckpt").symlink_to("epoch=2.ckpt")
    io.remove_checkpoint(tmp_path / "last.ckpt")
    assert (tmp_path / "epoch=2.ckpt").is_dir()
    io.remove_checkpoint(tmp_path / "nothing.ckpt")


def test_a_save_of_the_same_name_replaces_and_damage_is_found_when_asked_for(
    tmp_path: Path,
) -> None:
    path, io = tmp_path / "last.ckpt", MilepostCheckpointIO(verify=mp.Verify.DIGESTS)
    shared = torch.ones(3)
    for step in (1, 2):
        io.save_checkpoint(
            {"state_dict": {"a.w": shared, "b.w": shared}, "global_step": step, "epoch": 0}, path
        )
    loaded = io.load_checkpoint(path, map_location="cpu")
    assert loaded["global_step"] == 2
    assert loaded["state_dict"]["a.w"] is loaded["state_dict"]["b.w"]
    raw = bytearray((path / "model.safetensors").read_bytes())
    raw[-1] ^= 1
    (path / "model.safetensors").write_bytes(bytes(raw))
    with pytest.raises(DamagedError, match="nothing was loaded"):
        io.load_checkpoint(path)
    with pytest.raises(InvalidInputError, match="storage_options"):
        io.save_checkpoint({}, path, storage_options={})


def test_random_state_of_another_number_of_ranks_is_reported(tmp_path: Path) -> None:
    callback = MilepostRandomState()
    callback.load_state_dict({"ranks": callback.state_dict()["ranks"] * 3})
    with pytest.warns(mp.errors.CheckpointWarning, match="3 ranks, this run has 1"):
        fit(tmp_path, 1, callbacks=[callback])


def test_a_checkpoint_of_other_origin_is_refused(tmp_path: Path) -> None:
    mp.save(tmp_path / "checkpoint-1", {"model": nn.Linear(2, 2)}, step=1)
    with pytest.raises(InvalidInputError, match="Lightning did not save"):
        MilepostCheckpointIO().load_checkpoint(tmp_path / "checkpoint-1")


# ---- several ranks


class Ranks(ClusterEnvironment):  # type: ignore[misc]
    """The ranks of the group that exists already."""

    creates_processes_externally = True
    main_address = "127.0.0.1"
    main_port = 0

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return torch.distributed.get_world_size()

    def set_world_size(self, size: int) -> None:
        pass

    def global_rank(self) -> int:
        return torch.distributed.get_rank()

    def set_global_rank(self, rank: int) -> None:
        pass

    def local_rank(self) -> int:
        return torch.distributed.get_rank()

    def node_rank(self) -> int:
        return 0


def on_ranks(path: Path, epochs: int, **keywords: Any) -> pl.Trainer:
    plugins = [Ranks(), *keywords.pop("plugins", [])]
    made: pl.Trainer = fit(
        path, epochs, devices=torch.distributed.get_world_size(), plugins=plugins, **keywords
    )
    return made


def ddp_rank(rank: int, world_size: int, path: Path) -> None:
    def run(where: str, epochs: int, **keywords: Any) -> dict[str, Any]:
        strategy = DDPStrategy(process_group_backend="gloo")
        plugins = [MilepostCheckpointIO()]
        made = on_ranks(path / where, epochs, strategy=strategy, plugins=plugins, **keywords)
        return state_of(made)

    whole = run("whole", 4)
    run("cut", 2)
    resumed = run("cut", 4, resume=path / "cut" / "epoch=1.ckpt", seed=9)
    assert same(resumed, whole)
    assert mp.Checkpoint.open(path / "cut" / "epoch=3.ckpt").verify().ok


def test_a_run_under_ddp_resumes_with_the_random_state_of_every_rank(tmp_path: Path) -> None:
    run_world(2, ddp_rank, tmp_path)


class Sharded(pl.LightningModule):  # type: ignore[misc]
    """A transformers model with a head beside it, sharded by FSDP2."""

    def build(self) -> tuple[Any, nn.Module]:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            attention_dropout=0.2,
            pad_token_id=0,
        )
        return LlamaForCausalLM(config), nn.Linear(16, 1)

    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard

        if hasattr(self, "llm"):
            return
        self.llm, self.head = self.build()
        mesh = self.device_mesh["data_parallel"]
        for layer in self.llm.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.llm, mesh=mesh)
        fully_shard(self.head, mesh=mesh)

    def training_step(self, batch: Any, _: int) -> Any:
        tokens = batch[0]
        out = self.llm(tokens, labels=tokens, output_hidden_states=True)
        return out.loss + self.head(out.hidden_states[-1]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def train_dataloader(self) -> Any:
        tokens = torch.arange(8 * 6).reshape(8, 6) % 32
        return DataLoader(TensorDataset(tokens), batch_size=2, shuffle=True)


class Split(Sharded):
    """The same, its attention and its MLP split by tensor parallelism, sharded by FSDP2 beside."""

    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            ParallelStyle,
            RowwiseParallel,
            parallelize_module,
        )

        if hasattr(self, "llm"):
            return
        self.llm, self.head = self.build()
        by_rows, by_columns = RowwiseParallel(), ColwiseParallel()
        plan: dict[str, ParallelStyle] = {f"self_attn.{name}_proj": by_columns for name in "qkv"}
        plan |= {f"mlp.{name}_proj": by_columns for name in ("gate", "up")}
        plan |= {"self_attn.o_proj": by_rows, "mlp.down_proj": by_rows}
        for layer in self.llm.model.layers:
            parallelize_module(layer, self.device_mesh["tensor_parallel"], plan)
        mesh = self.device_mesh["data_parallel"]
        if mesh.size() > 1:
            for module in (*self.llm.model.layers, self.llm, self.head):
                fully_shard(module, mesh=mesh)


def whole_state(made: pl.Trainer) -> dict[str, Any]:
    """Weights and moments as whole tensors; collective."""

    def whole(tensor: Any) -> torch.Tensor:
        full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        copied: torch.Tensor = full.detach().clone()
        return copied

    state: dict[str, Any] = {}
    for name, parameter in made.lightning_module.named_parameters():
        state[name] = whole(parameter)
        for key, value in made.optimizers[0].state[parameter].items():
            state[f"{name}.{key}"] = whole(value)
    return state


def sharded_rank(
    rank: int, world_size: int, path: Path, module: Any = Sharded, tensor_parallel: int = 1
) -> tuple[dict[str, Any], set[str]]:
    """Weights and moments after a resume that is exact, and along what they were sharded."""

    def run(where: str, epochs: int, **keywords: Any) -> pl.Trainer:
        strategy = MilepostStrategy(
            data_parallel_size=world_size // tensor_parallel,
            tensor_parallel_size=tensor_parallel,
            process_group_backend="gloo",
        )
        callbacks = [
            ModelCheckpoint(path / where, filename="{epoch}", save_top_k=-1, every_n_epochs=1)
        ]
        return on_ranks(
            path / where,
            epochs,
            strategy=strategy,
            callbacks=callbacks,
            module=module,
            **keywords,
        )

    whole = whole_state(run("whole", 4))
    run("cut", 2)
    made = run("cut", 4, resume=path / "cut" / "epoch=1.ckpt", seed=9)
    assert same(whole_state(made), whole)
    assert isinstance(made.strategy, MilepostStrategy)
    assert made.strategy.report is not None and made.strategy.report.level is mp.Level.EXACT
    return whole, shard_dims(made.lightning_module)


def shard_dims(module: nn.Module) -> set[str]:
    """The dimensions of the mesh along which parameters are cut."""
    found: set[str] = set()
    for param in module.parameters():
        if isinstance(param, DTensor):
            assert param.device_mesh.mesh_dim_names is not None
            dims = zip(param.device_mesh.mesh_dim_names, param.placements, strict=True)
            found |= {name for name, placement in dims if placement.is_shard()}
    return found


def one_rank(rank: int, world_size: int, path: Path) -> tuple[str, int]:
    strategy = MilepostStrategy(
        data_parallel_size=1, tensor_parallel_size=1, process_group_backend="gloo"
    )
    made: pl.Trainer = fit(
        path / "one",
        5,
        devices=1,
        plugins=[Ranks()],
        strategy=strategy,
        callbacks=[],
        module=Sharded,
        resume=path / "cut" / "epoch=3.ckpt",
    )
    assert strategy.report is not None
    return strategy.report.level.value, made.global_step


def test_a_sharded_run_resumes_exactly_and_its_weights_are_those_of_the_hub(
    tmp_path: Path,
) -> None:
    from transformers import AutoModelForCausalLM

    for _, dims in run_world(2, sharded_rank, tmp_path):
        assert dims == {"data_parallel"}
    path = tmp_path / "cut" / "epoch=3.ckpt"
    files = os.listdir(path)
    assert "model.safetensors" in files and "module" in files
    opened = mp.Checkpoint.open(path)
    assert opened.verify().ok and opened.info.step == 8
    model = AutoModelForCausalLM.from_pretrained(path)
    saved = opened.read_weights()
    assert saved and all(torch.equal(t, model.state_dict()[n]) for n, t in saved.items())
    assert not any(name.startswith("llm.") for name in saved)
    assert run_world(1, one_rank, tmp_path) == [("resharded", 8 + 4)]
    with pytest.raises(InvalidInputError, match="saved by MilepostStrategy"):
        MilepostCheckpointIO().load_checkpoint(path)


@pytest.mark.parametrize(
    ("ranks", "cut_along"),
    [
        (2, {"tensor_parallel"}),
        pytest.param(4, {"data_parallel", "tensor_parallel"}, marks=pytest.mark.slow),
    ],
    ids=["tp", "fsdp2 and tp"],
)
def test_a_run_with_tensor_parallelism_resumes_exactly(
    tmp_path: Path, ranks: int, cut_along: set[str]
) -> None:
    from transformers import AutoModelForCausalLM

    found = run_world(ranks, sharded_rank, tmp_path, Split, 2)
    assert [dims for _, dims in found] == [cut_along] * ranks
    whole, _ = found[0]
    path = tmp_path / "cut" / "epoch=3.ckpt"
    assert mp.Checkpoint.open(path).verify().ok
    model = AutoModelForCausalLM.from_pretrained(path)
    loaded = {name: param.detach() for name, param in model.named_parameters()}
    assert loaded and same(loaded, {name: whole[f"llm.{name}"] for name in loaded})


# ---- modules out of checkpoints, for use


class Sized(pl.LightningModule):  # type: ignore[misc]
    """Its sizes are hyper-parameters, and it looks at what it is loaded from."""

    def __init__(self, width: int, depth: int = 1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.ModuleList([nn.Linear(4, width), *[nn.Linear(width, 4)] * depth])
        self.seen: dict[str, Any] = {}

    def training_step(self, batch: Any, _: int) -> Any:
        value = batch[0]
        for layer in self.layers:
            value = layer(value)
        return value.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.arange(64.0).reshape(16, 4) / 64), batch_size=2)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["note"] = "kept"

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen = checkpoint


class Numbers(pl.LightningDataModule):  # type: ignore[misc]
    """A data module with a state."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.read = 0

    def train_dataloader(self) -> Any:
        self.read += self.hparams["rows"]
        return DataLoader(TensorDataset(torch.ones(self.hparams["rows"], 4)), batch_size=2)

    def state_dict(self) -> dict[str, Any]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.read = state["read"]


def test_a_module_is_built_from_a_checkpoint_with_its_hyper_parameters_and_weights(
    tmp_path: Path,
) -> None:
    made = fit(tmp_path, 1, module=lambda: Sized(8))
    path = tmp_path / "epoch=0.ckpt"
    loaded = load_from_checkpoint(Sized, path, map_location="cpu")
    assert isinstance(loaded, Sized) and loaded.hparams["width"] == 8
    assert same(dict(loaded.state_dict()), dict(made.lightning_module.state_dict()))
    assert loaded.seen["note"] == "kept" and "optimizer_states" not in loaded.seen
    assert loaded.seen["state_dict"].keys() == loaded.state_dict().keys()
    with pytest.raises(RuntimeError, match="size mismatch"):
        load_from_checkpoint(Sized, path, width=6)
    with pytest.raises(RuntimeError, match="Missing key"):
        load_from_checkpoint(Sized, path, depth=2)
    deeper = load_from_checkpoint(Sized, path, depth=2, strict=False)
    assert len(deeper.layers) == 3


def test_a_data_module_is_built_from_a_checkpoint_with_its_state(tmp_path: Path) -> None:
    made = trainer(tmp_path, 1)
    made.fit(Sized(8), datamodule=Numbers(6))
    loaded = load_from_checkpoint(Numbers, tmp_path / "epoch=0.ckpt")
    assert loaded.hparams["rows"] == 6 and loaded.read == 6


def test_a_file_of_stock_lightning_gives_the_module_that_lightning_gives(tmp_path: Path) -> None:
    keep = [ModelCheckpoint(tmp_path, filename="{epoch}")]
    fit(tmp_path, 1, module=lambda: Sized(8), plugins=[], callbacks=keep)
    path = tmp_path / "epoch=0.ckpt"
    stock = Sized.load_from_checkpoint(path, weights_only=False)
    ours = load_from_checkpoint(Sized, path)
    assert same(dict(ours.state_dict()), dict(stock.state_dict()))


def flip_a_bit_of(file: Path) -> None:
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(bytes(raw))


def test_damage_is_found_before_a_module_is_built(tmp_path: Path) -> None:
    fit(tmp_path, 1, module=lambda: Sized(8))
    path = tmp_path / "epoch=0.ckpt"
    for verify in mp.Verify:
        load_from_checkpoint(Sized, path, verify=verify)
    flip_a_bit_of(path / "model.safetensors")
    for verify in (mp.Verify.DIGESTS, mp.Verify.WHILE_READING):
        with pytest.raises(DamagedError):
            load_from_checkpoint(Sized, path, verify=verify)
    mp.save(tmp_path / "checkpoint-1", {"model": nn.Linear(2, 2)}, step=1)
    with pytest.raises(mp.errors.CheckpointError, match="lightning"):
        load_from_checkpoint(Sized, tmp_path / "checkpoint-1")


class Whole(Sharded):
    """The same module, built where there is no mesh."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.save_hyperparameters()

    def configure_model(self) -> None:
        if self.device_mesh is not None:
            super().configure_model()
        elif not hasattr(self, "llm"):
            self.llm, self.head = self.build()


def test_one_process_builds_a_module_from_the_checkpoint_of_a_sharded_run(tmp_path: Path) -> None:
    first, _ = run_world(2, sharded_whole_rank, tmp_path)
    path = tmp_path / "epoch=0.ckpt"
    module = load_from_checkpoint(Whole, path, factor=2.0)
    assert module.hparams["factor"] == 2.0
    found = {name: param.detach() for name, param in module.named_parameters()}
    assert found and same(found, {name: first[name] for name in found})
    with pytest.raises(KeyMismatchError, match="extra"):
        load_from_checkpoint(Deeper, path)
    with pytest.raises(KeyMismatchError, match="extra"):
        load_from_checkpoint(Lenient, path, strict=True)
    for filled in (
        load_from_checkpoint(Deeper, path, strict=False),
        load_from_checkpoint(Lenient, path),
    ):
        part = dict(filled.named_parameters())
        assert len(part) > len(found) and same({name: part[name] for name in found}, found)
    for verify in mp.Verify:
        load_from_checkpoint(Whole, path, verify=verify)
    flip_a_bit_of(next(path.glob("model*.safetensors")))
    with pytest.raises(DamagedError):
        load_from_checkpoint(Whole, path, verify=mp.Verify.DIGESTS)
    with pytest.raises(LoadTornError):
        load_from_checkpoint(Whole, path, verify=mp.Verify.WHILE_READING)


class Deeper(Whole):
    """With a layer that no checkpoint has."""

    def configure_model(self) -> None:
        super().configure_model()
        self.extra = nn.Linear(2, 2)


class Lenient(Deeper):
    """It says of itself that it may be filled in part."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__(factor)
        self.strict_loading = False


def sharded_whole_rank(rank: int, world_size: int, path: Path) -> dict[str, Any]:
    strategy = MilepostStrategy(
        data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo"
    )
    keep = ModelCheckpoint(path, filename="{epoch}", save_top_k=-1, every_n_epochs=1)
    return whole_state(on_ranks(path, 1, strategy=strategy, callbacks=[keep], module=Whole))
