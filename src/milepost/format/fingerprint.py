"""The topology fingerprint: thirteen facts of a run that decide how optimizer state lies on ranks.

The names are those of the programs that keep one optimizer shard for each rank and can only resume
on the same shape. Here they never forbid anything: they tell a person what changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import msgspec

from milepost.errors import InvalidInputError

Differences: TypeAlias = dict[str, tuple[Any, Any]]
"""Field to (saved, now)."""


class OptimizerStateFingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a run. Sizes count ranks along an axis, 1 where there is no such axis.

    `ep_scope` is what an expert group spans and `nvlink_domain_size` the ranks of one fast domain:
    nothing but the caller knows them. `expert_replica_size` is the number of ranks that hold the
    same experts. None means not stated, which is compatible with everything.
    """

    world_size: int
    ep_size: int
    expert_tp_size: int
    cp_size: int
    tp_size: int
    pp_size: int
    fsdp_shard_ep1_experts: bool | None
    optimizer_class: str
    ep_scope: str | None
    use_grouped_gemm: bool | None
    hsdp: bool | None
    nvlink_domain_size: int | None
    expert_replica_size: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, as the manifest holds them."""
        return {name: getattr(self, name) for name in FIELDS}

    @staticmethod
    def from_recorded(value: object) -> OptimizerStateFingerprint | None:
        """The fingerprint that a manifest records; None where it holds none.

        None it is as well when `value` is no object, lacks a field (`expert_replica_size` may be
        absent) or has one of another type. Unknown fields are ignored.
        """
        if not isinstance(value, Mapping):
            return None
        try:
            return msgspec.convert(dict(value), OptimizerStateFingerprint)
        except msgspec.ValidationError:
            return None

    def stated(self, fields: Mapping[str, Any]) -> OptimizerStateFingerprint:
        """This fingerprint with the fields that the caller states in place of the derived ones."""
        unknown = sorted(set(fields) - set(FIELDS))
        if unknown:
            raise InvalidInputError(
                f"fingerprint: {', '.join(unknown)} is no field of it; the fields are "
                f"{', '.join(FIELDS)}"
            )
        try:
            return msgspec.convert({**self.to_dict(), **fields}, OptimizerStateFingerprint)
        except msgspec.ValidationError as error:
            raise InvalidInputError(f"fingerprint: {error}") from None

    def differences(self, now: OptimizerStateFingerprint) -> Differences:
        """The fields in which the saved fingerprint (this) and the one of `now` contradict."""
        pairs = {name: (getattr(self, name), getattr(now, name)) for name in FIELDS}
        return {
            name: (saved, live)
            for name, (saved, live) in pairs.items()
            if saved != live and saved is not None and live is not None
        }


FIELDS: tuple[str, ...] = OptimizerStateFingerprint.__struct_fields__

Stated: TypeAlias = OptimizerStateFingerprint | Mapping[str, Any] | None
"""What a caller says of the fingerprint: all of it, some fields, or nothing."""
