"""The state of one run of the safe unpickler: input, stack, marks, memo and what was refused."""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable

from milepost.errors import UnsafePickleError
from milepost.format import pickle_globals, torch_globals
from milepost.format.lazy import Opaque
from milepost.format.pickle_globals import Global
from milepost.format.pickle_tree import Budget, check_key

PersistentLoad = Callable[[object], object]


class Machine:
    """Stack, marks and memo of one run."""

    def __init__(
        self,
        raw: bytes,
        where: str,
        allow: frozenset[str],
        persistent_load: PersistentLoad | None,
    ) -> None:
        self.raw = raw
        self.where = where
        self.allow = allow
        self.persistent_load = persistent_load
        self.position = 0
        self.protocol = 0
        self.stack: list[object] = []
        self.marks: list[int] = []
        self.memo: dict[int, object] = {}
        self.refused: dict[str, str] = {}
        self.budget = Budget(len(raw))

    def refusal(self) -> UnsafePickleError:
        names = list(self.refused)
        shown = "; ".join(f"{name} ({self.refused[name]})" for name in names[:5])
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        return UnsafePickleError(
            f"{self.where}: the pickle wants {shown}{more}, which is not plain data; nothing of "
            f"it was imported or run. If its fields are wanted as inert data, allow it by name: "
            f"allow={names[:5]!r}",
            path=self.where,
            global_name=names[0],
        )

    # input

    def take(self, nbytes: int) -> bytes:
        end = self.position + nbytes
        if end > len(self.raw):
            left = len(self.raw) - self.position
            raise ValueError(f"it ends early: {nbytes} bytes wanted, {left} are left")
        data = self.raw[self.position : end]
        self.position = end
        return data

    def counted(self, layout: str) -> bytes:
        """The bytes after a length of this `struct` layout."""
        (nbytes,) = struct.unpack(layout, self.take(struct.calcsize(layout)))
        if nbytes < 0:
            raise ValueError(f"a length is negative: {nbytes}")
        return self.take(nbytes)

    def line(self) -> bytes:
        end = self.raw.find(b"\n", self.position)
        if end < 0:
            raise ValueError("a text line does not end")
        data = self.raw[self.position : end]
        self.position = end + 1
        return data

    # stack

    def push(self, value: object) -> None:
        self.stack.append(value)

    def pop(self) -> object:
        self.need(1)
        return self.stack.pop()

    def need(self, count: int) -> None:
        if len(self.stack) - (self.marks[-1] if self.marks else 0) < count:
            raise ValueError("the stack is empty")

    def top(self) -> object:
        self.need(1)
        return self.stack[-1]

    def pop_mark(self) -> list[object]:
        if not self.marks:
            raise ValueError("a mark is missing")
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items

    # globals

    def find(self, module: str, name: str) -> object:
        if self.protocol < 3:
            module, name = pickle_globals.modern_name(module, name)
        full = f"{module}.{name}"
        if full in self.allow:
            return pickle_globals.opaque_global(full)
        for table in (pickle_globals.GLOBALS, torch_globals.GLOBALS):
            if full in table:
                return table[full]
        why = torch_globals.why_refused(full)
        self.refused.setdefault(full, why)
        return pickle_globals.opaque_global(full)

    def call(self, function: object, args: object) -> object:
        if not isinstance(function, Global) or function.call is None:
            raise ValueError(f"{kind_of(function)} is called, which is no constructor")
        if not isinstance(args, tuple):
            raise ValueError(f"{function.name} is called with {kind_of(args)} for arguments")
        self.budget.spend_copies(args)
        if function.hashes and args and isinstance(args[0], list | tuple):
            for member in args[0]:
                check_key(member, self.budget)
        return function.call(*args)

    def new(self, cls: object, args: object, kwargs: object) -> object:
        if not isinstance(cls, Global) or cls.new is None:
            raise ValueError(f"{kind_of(cls)} is instantiated, which is no allowed class")
        if not isinstance(args, tuple) or not isinstance(kwargs, dict):
            raise ValueError(f"{cls.name} is instantiated without an argument tuple")
        self.budget.spend_copies(args)
        if cls.hashes:
            return self.call(cls, args)
        return cls.new(*args, **{str(key): value for key, value in kwargs.items()})

    def set_item(self, target: object, key: object, value: object) -> None:
        if type(target) is Opaque:
            target.entries.append((key, value))
        elif isinstance(target, dict) and type(target) in _MAPPINGS:
            check_key(key, self.budget)
            target[key] = value
        else:
            raise ValueError(f"items are set on {kind_of(target)}")

    def extend(self, target: object, items: list[object]) -> None:
        if type(target) is list or type(target) is deque:
            target.extend(items)
        elif type(target) is Opaque:
            target.items.extend(items)
        else:
            raise ValueError(f"items are appended to {kind_of(target)}")


_MAPPINGS = (dict, OrderedDict, Counter, defaultdict)


def kind_of(value: object) -> str:
    return value.name if isinstance(value, Global) else f"a value of type {type(value).__name__}"
