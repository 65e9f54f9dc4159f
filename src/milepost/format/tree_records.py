"""The words that the two halves of the typed tree share."""

from __future__ import annotations

import functools
from collections import namedtuple
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

TAG_KEY = "$type"
MAX_DEPTH = 64  # containers inside each other; each takes at most 3 of the 256 levels of JSON
MAX_EXACT_INT = 2**53  # above it readers of JSON that know only doubles would round
FOREIGN_PREFIX = "torch."
TENSOR_TAGS = frozenset({"torch.tensor", "torch.parameter"})


@dataclass(frozen=True, slots=True)
class Reference:
    """What stands in the JSON for a value that the sink took: a tag `torch.<word>` and fields.

    `decode` without a source leaves these in place of the values, for readers without torch.
    """

    tag: str
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class EnumValue:
    """An enum member whose class the caller of `decode` did not pass; encodes as that member."""

    class_name: str
    name: str | None  # None for a combination of flags
    value: Any


class TensorSink(Protocol):
    """Takes the values that do not belong into JSON."""

    def add(self, key: str, value: Any) -> Reference | None:
        """A reference for a value it takes, None for one it does not know.

        Raises UnencodableError for one that it knows and refuses.
        """

    def add_array(self, key: str, raw: NDArray[np.uint8]) -> str:
        """The name under which it stores the raw bytes of a numpy array."""


class TensorSource(Protocol):
    """Gives back what a sink took. LookupError, ValueError and TypeError are reported as damage,
    with the place; errors of Milepost pass as they are."""

    def get(self, reference: Reference) -> Any: ...

    def get_array(self, name: str) -> NDArray[np.uint8]: ...


def qualified_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


@functools.lru_cache(maxsize=256)
def named_tuple_class(class_name: str, fields: tuple[str, ...]) -> Any:
    """A namedtuple class of its own with these fields, which encodes under `class_name` again.

    ValueError for fields that are no identifiers, so that nothing but a tuple can come of it.
    """
    module, _, qualname = class_name.rpartition(".")
    cls = namedtuple("Record", fields, module=module)  # type: ignore[misc]
    cls.__name__ = cls.__qualname__ = qualname
    return cls


def is_named_tuple(cls: type) -> bool:
    fields = getattr(cls, "_fields", None)
    return issubclass(cls, tuple) and isinstance(fields, tuple) and hasattr(cls, "_make")


def child(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name
