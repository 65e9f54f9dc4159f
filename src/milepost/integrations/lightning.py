"""Lightning: its checkpoints through Milepost's storage, in one process, under DDP, and sharded.

    from milepost.integrations.lightning import MilepostCheckpointIO, MilepostRandomState

    Trainer(plugins=[MilepostCheckpointIO()], callbacks=[MilepostRandomState()])   # one or DDP

    from milepost.integrations.lightning import MilepostStrategy

    Trainer(strategy=MilepostStrategy(data_parallel_size=8, tensor_parallel_size=1))   # FSDP2, TP

    model = load_from_checkpoint(MyModule, "run/epoch=1.ckpt")   # MyModule.load_from_checkpoint

A checkpoint is a directory that is committed at once or not at all. Nothing in it is a pickle.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from milepost._warn import warn_user
from milepost.checkpointing.load import RngRestore, Verify, load
from milepost.checkpointing.report import LoadReport
from milepost.checkpointing.save import save
from milepost.checkpointing.save_prepare import Rng
from milepost.checkpointing.target import OnExisting
from milepost.checkpointing.world import alone, converse
from milepost.engine.rendezvous import together
from milepost.engine.write import WriteOptions
from milepost.errors import (
    CheckpointWarning,
    InvalidInputError,
    MissingExtraError,
    NotFoundError,
)
from milepost.format.manifest import MANIFEST_NAME
from milepost.integrations.lightning_state import as_file, models_of, module_of, moved, require_ok
from milepost.layouts.checkpoint import Checkpoint
from milepost.layouts.directory import DirectoryCheckpoint, require_intact
from milepost.layouts.torch_archive import TorchArchive
from milepost.state.policies import Missing, Unexpected
from milepost.state.rng import capture_rng, pack_rng, restore_rng, unpack_rng
from milepost.storage.intent import remove_entry
from milepost.storage.lease import RunLease

try:
    from lightning.pytorch import LightningModule
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.plugins.io import CheckpointIO
    from lightning.pytorch.strategies import ModelParallelStrategy
except ImportError as _error:
    raise MissingExtraError(
        "milepost.integrations.lightning needs lightning; pip install lightning"
    ) from _error

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

KEY = "lightning"
_STATE_DICT = "state_dict"
_OPTIMIZERS = "optimizer_states"
_Module = TypeVar("_Module", bound=Any)


class MilepostCheckpointIO(CheckpointIO):  # type: ignore[misc]
    """A plugin for one process and for DDP: the checkpoint of Lightning as a Milepost directory.

    Its weights are those of the `state_dict`, in `model.safetensors`; all else (optimizers, loops,
    callbacks, hyper-parameters) is a typed tree. What cannot be stored without pickle is refused
    with its key, before a file exists. An existing checkpoint of the name is exchanged at once.

    A `.ckpt` file that Lightning wrote itself is read too, by the safe unpickler.

    `verify` is what is proven of a checkpoint when it is read; `options` are ways of writing.
    """

    def __init__(
        self, *, verify: Verify = Verify.SIZES, options: WriteOptions | None = None
    ) -> None:
        self._verify = verify
        self._options = options

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | Path,
        storage_options: Any | None = None,
    ) -> None:
        """Write `checkpoint` as the directory `path`. Called on one rank; not collective."""
        _refuse_options(storage_options)
        weights = checkpoint[_STATE_DICT]
        tensors = {name: value for name, value in weights.items() if isinstance(value, Tensor)}
        rest = {key: value for key, value in checkpoint.items() if key != _STATE_DICT}
        extra = {name: value for name, value in weights.items() if name not in tensors}
        with alone():
            save(
                Path(path),
                {
                    "model": module_of(tensors),
                    KEY: {"is_sharded": False, "checkpoint": rest, "extra": extra},
                },
                step=int(checkpoint.get("global_step", 0)),
                epoch=float(checkpoint.get("epoch", 0)),
                rng=Rng.LEAVE_OUT,
                on_existing=OnExisting.REPLACE,
                options=self._options,
            )

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Any | None = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """The checkpoint at `path`, as Lightning saved it. Nothing is executed, so `weights_only`
        changes nothing. A device or its name as `map_location` moves the tensors there."""
        place = Path(path)
        if place.is_file():
            with TorchArchive.open(place) as archive:
                loaded = archive.materialise(archive.tree)
        else:
            loaded = self._read(place)
        if isinstance(map_location, str | torch.device):
            loaded = moved(loaded, torch.device(map_location))
        found: dict[str, Any] = loaded
        return found

    def _read(self, path: Path) -> dict[str, Any]:
        opened = Checkpoint.open(path)
        if not isinstance(opened, DirectoryCheckpoint) or KEY not in opened.manifest.state:
            raise InvalidInputError(
                f"{path}: a {opened.layout.value} checkpoint that Lightning did not save: it has "
                "no loops or callbacks to go on with",
                path=path,
            )
        require_intact(opened, ("weights", "state"))
        if self._verify is not Verify.SIZES:
            require_ok(opened)
        tree = opened.training_state()[KEY]
        if tree["is_sharded"]:
            raise InvalidInputError(
                f"{path}: saved by MilepostStrategy from a sharded model; resume it with that "
                "strategy, or load its weights with from_pretrained",
                path=path,
            )
        checkpoint: dict[str, Any] = tree["checkpoint"]
        return {**checkpoint, _STATE_DICT: {**opened.read_weights(), **tree["extra"]}}

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a checkpoint; it has its name until it is out of the way as a whole."""
        place = Path(path)
        if place.exists() or place.is_symlink():
            with RunLease.of(place.parent):
                remove_entry(place.parent, place.name)


class MilepostRandomState(Callback):  # type: ignore[misc]
    """Saves the random state of every rank with a checkpoint, and sets it when training goes on.

    Lightning saves none, so that dropout and shuffling differ after a resume. For
    `MilepostCheckpointIO`; `MilepostStrategy` does it by itself.
    """

    def __init__(self) -> None:
        self._saved: list[bytes] = []

    def state_dict(self) -> dict[str, Any]:
        """The state of each rank, in order of rank; collective."""
        with converse() as talk, together(talk, "random-state"):
            return {"ranks": talk.gather("rng", pack_rng(capture_rng()))}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take it; it is set when training begins."""
        self._saved = [bytes(row) for row in state_dict["ranks"]]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set it before data is shuffled, if there are as many ranks as when it was saved."""
        if self._saved and len(self._saved) != trainer.world_size:
            warn_user(
                f"the checkpoint has the random state of {len(self._saved)} ranks, this run has "
                f"{trainer.world_size}: it draws other numbers from here on",
                CheckpointWarning,
            )
        self._restore(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set it again within an epoch, whose shuffling was drawn before the save."""
        if _is_within_epoch(trainer):
            self._restore(trainer)
        self._saved = []

    def _restore(self, trainer: Trainer) -> None:
        if len(self._saved) == trainer.world_size:
            row = self._saved[trainer.global_rank]
            restore_rng(unpack_rng(row, "the checkpoint's random state"))


class MilepostStrategy(ModelParallelStrategy):  # type: ignore[misc]
    """FSDP2 and tensor parallelism, saved and resumed shard by shard, with weights for the Hub.

    Use it as `ModelParallelStrategy`, whose arguments it takes. If the LightningModule has one
    child that is a transformers model, this lies at the root of the checkpoint under the names of
    the Hub, and `from_pretrained` loads it; what else the module holds lies beside. Nothing is
    gathered: `on_save_checkpoint` sees no weights. A checkpoint resumes on any number of ranks.

    `processing_class` is the tokenizer or processor to save along; `report` tells what the last
    load did.
    """

    report: LoadReport | None = None

    def __init__(
        self,
        *arguments: Any,
        processing_class: Any | None = None,
        verify: Verify = Verify.SIZES,
        options: WriteOptions | None = None,
        **keywords: Any,
    ) -> None:
        super().__init__(*arguments, **keywords)
        self._processing_class = processing_class
        self._verify = verify
        self._options = options
        self.checkpoint_io = MilepostCheckpointIO(verify=verify, options=options)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Empty: the model is saved as it lies on the ranks."""
        return {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Empty: optimizers are saved as they lie on the ranks."""
        return {}

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        filepath: str | Path,
        storage_options: Any | None = None,
    ) -> None:
        """Write the checkpoint directory `filepath`; collective."""
        _refuse_options(storage_options)
        with_optimizers = _OPTIMIZERS in checkpoint
        rest = {k: v for k, v in checkpoint.items() if k not in (_STATE_DICT, _OPTIMIZERS)}
        state = self._live(with_optimizers=with_optimizers)
        save(
            Path(self.broadcast(str(filepath))),
            {**state, KEY: {"is_sharded": True, "checkpoint": rest}},
            step=int(checkpoint.get("global_step", 0)),
            epoch=float(checkpoint.get("epoch", 0)),
            processing_class=self._processing_class,
            on_existing=OnExisting.REPLACE,
            options=self._options,
        )

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Fill model and optimizers in place and return the rest; collective."""
        path = Path(self.broadcast(str(checkpoint_path)))
        if not (path / MANIFEST_NAME).exists():
            kind = NotFoundError if not path.exists() else InvalidInputError
            raise kind(f"{path}: no checkpoint of Milepost lies there", path=path)
        rest: dict[str, Any] = {}
        is_training = bool(self.optimizers)
        self.report = load(
            path,
            {**self._live(with_optimizers=is_training), KEY: rest},
            rng=RngRestore.NOW if is_training else RngRestore.LATER,
            verify=self._verify,
        )
        if not rest.get("is_sharded"):
            raise InvalidInputError(
                f"{path}: saved by MilepostCheckpointIO; resume it with that plugin", path=path
            )
        return {**rest["checkpoint"], _STATE_DICT: {}, _OPTIMIZERS: []}

    def on_train_start(self) -> None:
        """Set the random state again within an epoch, whose shuffling was drawn before the save."""
        super().on_train_start()
        if self.report is not None and _is_within_epoch(self.lightning_module.trainer):
            self.report.restore_rng()

    def _live(self, *, with_optimizers: bool) -> dict[str, Any]:
        module = self.lightning_module
        assert module is not None
        state = models_of(module)
        optimizers = self.optimizers if with_optimizers else []
        if len(optimizers) == 1:
            return {**state, "optimizer": optimizers[0]}
        return {**state, **{f"optimizer_{n}": each for n, each in enumerate(optimizers)}}


def load_from_checkpoint(
    cls: type[_Module],
    checkpoint_path: str | Path,
    *,
    verify: Verify = Verify.SIZES,
    **keywords: Any,
) -> _Module:
    """`cls.load_from_checkpoint` for a checkpoint of Milepost: a new module with its weights.

    `cls` is a class of LightningModules or LightningDataModules. `keywords` are those of the method
    of Lightning: `map_location` (a device or its name where the run was sharded), `hparams_file`,
    `strict`, and arguments of the class in place of the saved ones. Nothing is executed, so
    `weights_only` changes nothing. The module's `on_load_checkpoint` sees no states of optimizers,
    and of a run with `MilepostStrategy` no weights; the module must then be one that one process
    can build. A file that Lightning wrote is read too. Not collective.

    With `verify=Verify.WHILE_READING`, damage in the weights of a run with `MilepostStrategy` is
    found as the module is filled (`LoadTornError`), in others before it is built (`DamagedError`).
    """
    path = Path(checkpoint_path)
    keywords["weights_only"] = False  # of bytes that are made here
    if path.is_file():
        file = MilepostCheckpointIO().load_checkpoint(path)
        return cls.load_from_checkpoint(as_file(file), **keywords)  # type: ignore[no-any-return]
    tree: dict[str, Any] = {}
    with alone():
        load(path, {KEY: tree}, rng=RngRestore.LATER, verify=verify)
    checkpoint = tree["checkpoint"]
    checkpoint.pop(_OPTIMIZERS, None)
    if tree["is_sharded"]:
        left = verify if verify is Verify.WHILE_READING else Verify.SIZES  # digests are proven now
        return _from_shards(cls, path, checkpoint, left, keywords)
    opened = Checkpoint.open(path)
    if verify is Verify.WHILE_READING:
        require_ok(opened)
    checkpoint[_STATE_DICT] = {**opened.read_weights(), **tree["extra"]}
    return cls.load_from_checkpoint(as_file(checkpoint), **keywords)  # type: ignore[no-any-return]


def _from_shards(
    cls: type[_Module],
    path: Path,
    checkpoint: dict[str, Any],
    verify: Verify,
    keywords: dict[str, Any],
) -> _Module:
    """Lightning builds the module, and it is filled where it lies."""
    is_module = issubclass(cls, LightningModule)
    strict = keywords.pop("strict", None)
    device = keywords.pop("map_location", None)
    file = as_file({**checkpoint, _STATE_DICT: {}})
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(The state dict in|Found keys that are in the model)")
        made: _Module = cls.load_from_checkpoint(
            file, **({"strict": False} if is_module else {}), **keywords
        )
    if is_module:
        module: Any = made if device is None else made.to(device)
        is_strict = module.strict_loading if strict is None else strict
        with alone():
            load(
                path,
                models_of(module),
                missing=Missing.ERROR if is_strict else Missing.KEEP,
                unexpected=Unexpected.ERROR if is_strict else Unexpected.IGNORE,
                rng=RngRestore.LATER,
                verify=verify,
            )
    return made


def _is_within_epoch(trainer: Trainer) -> bool:
    """Whether training goes on from a checkpoint that was written in the middle of an epoch."""
    return bool(trainer.fit_loop.restarted_mid_epoch)


def _refuse_options(storage_options: Any | None) -> None:
    if storage_options is not None:
        raise InvalidInputError(
            "storage_options have no meaning here; state ways of writing as options=WriteOptions()"
        )
