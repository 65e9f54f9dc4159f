"""The topology fingerprint: what counts as one, what may be absent, what differs."""

from __future__ import annotations

from typing import Any

import pytest

from milepost.errors import InvalidInputError
from milepost.format.fingerprint import FIELDS, OptimizerStateFingerprint

RECORDED: dict[str, Any] = {
    "world_size": 8,
    "ep_size": 2,
    "expert_tp_size": 1,
    "cp_size": 1,
    "tp_size": 2,
    "pp_size": 1,
    "fsdp_shard_ep1_experts": False,
    "optimizer_class": "AdamW",
    "ep_scope": "node",
    "use_grouped_gemm": True,
    "hsdp": False,
    "nvlink_domain_size": 8,
    "expert_replica_size": 4,
}


def recorded(**changes: Any) -> OptimizerStateFingerprint:
    found = OptimizerStateFingerprint.from_recorded({**RECORDED, **changes})
    assert found is not None
    return found


def test_it_has_the_thirteen_fields_and_comes_back_from_its_dict() -> None:
    assert set(FIELDS) == set(RECORDED) and len(FIELDS) == 13
    assert recorded().to_dict() == RECORDED


@pytest.mark.spec("v1#fingerprint-1")
@pytest.mark.parametrize("field", sorted(set(RECORDED) - {"expert_replica_size"}))
def test_without_a_field_there_is_no_fingerprint(field: str) -> None:
    lacking = {name: value for name, value in RECORDED.items() if name != field}
    assert OptimizerStateFingerprint.from_recorded(lacking) is None


@pytest.mark.spec("v1#fingerprint-1")
@pytest.mark.parametrize("value", [None, 3, "AdamW", [RECORDED], {**RECORDED, "tp_size": "two"}])
def test_what_is_no_object_of_these_fields_is_no_fingerprint(value: Any) -> None:
    assert OptimizerStateFingerprint.from_recorded(value) is None


@pytest.mark.spec("v1#fingerprint-1")
def test_unknown_fields_are_ignored_and_the_replica_size_may_be_absent() -> None:
    older = {name: value for name, value in RECORDED.items() if name != "expert_replica_size"}
    found = OptimizerStateFingerprint.from_recorded({**older, "moon_phase": "full"})
    assert found is not None and found.expert_replica_size is None
    assert found.differences(recorded()) == {}


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_that_differs_is_named_with_both_values(field: str) -> None:
    value = RECORDED[field]
    other = not value if isinstance(value, bool) else "other" if isinstance(value, str) else 64
    assert recorded().differences(recorded(**{field: other})) == {field: (value, other)}


def test_what_is_not_stated_differs_from_nothing() -> None:
    assert recorded().differences(recorded(ep_scope=None, nvlink_domain_size=None)) == {}


def test_a_caller_states_fields_by_name() -> None:
    assert recorded().stated({"cp_size": 4}) == recorded(cp_size=4)
    with pytest.raises(InvalidInputError, match="cpu_size is no field of it"):
        recorded().stated({"cpu_size": 4})
    with pytest.raises(InvalidInputError, match=r"fingerprint: .*cp_size"):
        recorded().stated({"cp_size": "four"})
