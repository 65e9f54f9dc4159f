"""What is public is a list, guarded here; each name says what it is."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Iterator
from enum import Enum
from types import FunctionType
from typing import Any

import pytest

import milepost as mp
from milepost import errors

# Adding a name here makes it a promise. Names are never removed within a major version.
PUBLIC = """
AnyOf BestMetric BestMode Checkpoint CheckpointContributor CheckpointInfo CheckpointManager
ClassPolicy DtypePolicy Durability EveryNMinutes EveryNSteps KeepAll KeepBest KeepEvery KeepLast
KeepNewerThan Layout Level Lineage LoadReport Missing Moments OnExisting OnSignal ReadOptions Resume
RetentionPolicy Rng RngRestore RunEntry RunListing SaveContext SavePolicy SaveReport ShapePolicy
State StreamCursor StreamDataState StreamShardState TensorInfo Unexpected Verify WriteMode
WriteOptions collect_extra_state
convert_legacy_checkpoint_to_split dedup_source errors hf_source list_run load load_checkpoint
load_extra_state load_full_state_dict load_peft local_source newest save save_checkpoint save_peft
shard_key
shield_worker FileInfo Problem Severity VerifyReport
MergeOnSave OptimizerStateFingerprint WeightFiles save_pp_checkpoint save_sharded_ep
validate_ep_sharded_save
Adapters CheckpointKind ExpertLora checkpoint_kind declare_expert_lora
BlockPolicy Copies InnerDim PartRole register_tensor_class
ReadMode PackedShard declare_placement
BestCheckpoint ElasticSampler EpochTail GlobalPosition SampleOrder
HostBuffers InFlight Overlap SaveHandle Unchanged save_async wait_for_saves
EventKind ProgressBar SaveEvent progress_bar
Mirror Saving Staging WhenIdle
BaseModelRelation PublishMode PublishReport PublishTo StaleWeights TrainingState Visibility
apply_training_sidecars publish
Weights WeightsOrigin WeightsSource read_sidecar resolve_resume_weights_source stamp_weights_source
OnStage OnStale Stage StageAction StagePipeline StageResult StageStart
""".split()  # noqa: SIM905

ERRORS = """
CheckpointError NotFoundError NotCommittedError DamagedError FormatError DigestMismatchError
CheckpointIncompleteError InconsistentError ReplacedError UnsupportedVersionError UnsafePickleError
InvalidInputError UnencodableError MismatchError KeyMismatchError ShapeMismatchError
DtypeMismatchError ConfigMismatchError ExistsError RunInUseError StorageError NoSpaceError
LoadTornError CheckpointMigrationError MissingExtraError RankError RankTimeoutError
SaveOutcomeUnknownError SaveInFlightError StateChangedError PublishError
""".split()  # noqa: SIM905


def test_the_public_names_are_those_of_the_list() -> None:
    assert mp.__all__ == sorted(mp.__all__)
    assert set(mp.__all__) == set(PUBLIC)
    assert dir(mp) == mp.__all__


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_there_and_documented_with_all_it_offers(name: str) -> None:
    value = getattr(mp, name)
    if name == "State":  # an alias of a type
        return
    assert inspect.getdoc(value), f"{name} has no docstring"
    if inspect.isclass(value):
        assert not (value.__doc__ or "").startswith(f"{name}("), f"{name}: made by dataclass"
        for member in members(value):
            documented = inspect.getdoc(getattr(value, member)) or member in OF_PROTOCOLS
            assert documented, f"{name}.{member} has no docstring"


def members(value: type[Any]) -> Iterator[str]:
    """Public methods and properties that a class defines itself."""
    for name, member in vars(value).items():
        if name.startswith("_") or issubclass(value, Enum):
            continue
        if isinstance(member, property | staticmethod | classmethod | FunctionType):
            yield name


# Methods whose contract stands once, in the protocol that asks for them.
OF_PROTOCOLS = {
    name for protocol in (mp.RetentionPolicy, mp.SavePolicy) for name in members(protocol)
}


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"module 'milepost' has no attribute 'laod'"):
        _ = mp.laod


def test_importing_the_package_costs_nothing() -> None:
    code = "import milepost, sys; print(sorted(m for m in sys.modules if m in %r))"
    heavy = {"torch", "numpy", "msgspec", "xxhash", "typer", "rich", "transformers"}
    done = subprocess.run(
        [sys.executable, "-c", code % (heavy,)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


# Its signature is printed in the source document, flags and all.
PRINTED_WITH_FLAGS = "convert_legacy_checkpoint_to_split"


def test_no_public_function_takes_a_boolean() -> None:
    for name in PUBLIC:
        if name == PRINTED_WITH_FLAGS:
            continue
        value = getattr(mp, name)
        if isinstance(value, FunctionType):
            for parameter in inspect.signature(value).parameters.values():
                assert "bool" not in str(parameter.annotation), f"{name}({parameter})"


# Errors.


def all_errors() -> list[type[errors.CheckpointError]]:
    found, queue = [], [errors.CheckpointError]
    while queue:
        found.append(queue[0])
        queue = queue[1:] + queue[0].__subclasses__()
    return [each for each in dict.fromkeys(found) if each.__module__ == errors.__name__]


def test_the_errors_are_those_of_the_list_and_drawn_in_the_tree() -> None:
    assert {each.__name__ for each in all_errors()} == set(ERRORS)
    for name in ERRORS:
        assert name in (errors.__doc__ or ""), f"{name} is not in the drawing"


def test_every_error_has_a_code_of_its_own() -> None:
    codes = [each.code for each in all_errors()]
    assert len(set(codes)) == len(codes)
    assert all(code == code.lower() and " " not in code for code in codes)


@pytest.mark.parametrize(
    ("ours", "builtin"),
    [
        (errors.NotFoundError, FileNotFoundError),
        (errors.DamagedError, ValueError),
        (errors.UnsupportedVersionError, ValueError),
        (errors.UnsafePickleError, ValueError),
        (errors.InvalidInputError, ValueError),
        (errors.UnencodableError, TypeError),
        (errors.MismatchError, RuntimeError),
        (errors.MismatchError, ValueError),
        (errors.ExistsError, FileExistsError),
        (errors.StorageError, OSError),
        (errors.LoadTornError, RuntimeError),
        (errors.CheckpointMigrationError, RuntimeError),
        (errors.MissingExtraError, ImportError),
    ],
)
def test_an_error_is_also_the_builtin_that_people_expect(
    ours: type[Exception], builtin: type[Exception]
) -> None:
    assert issubclass(ours, builtin)


def test_an_error_carries_what_it_says_and_prints_its_message_only() -> None:
    missing = errors.NotFoundError("a/b: nothing is there", path="a/b")
    assert (str(missing), missing.path) == ("a/b: nothing is there", "a/b")
    full = errors.NoSpaceError("full", path="a", needed_nbytes=2, free_nbytes=1)
    assert (full.errno, full.needed_nbytes, full.free_nbytes, str(full)) == (28, 2, 1, "full")
    keys = errors.KeyMismatchError("keys", missing=["a"], unexpected=["b"])
    assert (keys.missing, keys.unexpected) == (("a",), ("b",))
