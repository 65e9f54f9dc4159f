"""The safe unpickler: pickle op codes run over plain data, with no way to code.

`loads` understands protocols 0 to 5. A pickle names classes and functions; here a name is looked
up in a table of harmless constructors (`pickle_globals`, `torch_globals`) and never imported. All
names outside the table are collected and refused together. Memory and time are bounded by the
input: lengths are checked against the bytes that are there, and constructors that copy draw on a
budget.
"""

from __future__ import annotations

from collections.abc import Collection

from milepost.errors import FormatError, UnsafePickleError
from milepost.format.pickle_machine import Machine, PersistentLoad
from milepost.format.pickle_opcodes import OPERATIONS
from milepost.format.pickle_tree import check_tree

STOP = 0x2E


def loads(
    raw: bytes,
    *,
    where: str,
    allow: Collection[str] = (),
    persistent_load: PersistentLoad | None = None,
) -> object:
    """The data of a pickle, or `UnsafePickleError` naming every global that is no plain data.

    `where` names the file in messages. `allow` lists further globals as `module.name`; instances
    of them come out as `Opaque`. `persistent_load` turns a persistent id into a value; without it
    a pickle with one is refused. Raises `FormatError` when the bytes are no well-formed pickle.

    >>> loads(b"\\x80\\x02}X\\x04\\x00\\x00\\x00stepK\\x05s.", where="x.pkl")
    {'step': 5}
    """
    machine = Machine(raw, where, frozenset(allow), persistent_load)
    try:
        tree = _run(machine)
        check_tree(tree, machine.budget)
    except (ValueError, TypeError, ArithmeticError, LookupError, AttributeError) as error:
        if machine.refused:
            raise machine.refusal() from error
        if isinstance(error, FormatError | UnsafePickleError):
            raise
        raise FormatError(
            f"{where}: not a well-formed pickle: {error} (at byte {machine.position})", path=where
        ) from error
    if machine.refused:
        raise machine.refusal()
    return tree


def _run(machine: Machine) -> object:
    while True:
        code = machine.take(1)[0]
        if code == STOP:
            tree = machine.pop()
            if machine.stack or machine.marks:
                raise ValueError("values are left on the stack")
            return tree
        operation = OPERATIONS.get(code)
        if operation is None:
            raise ValueError(f"op code 0x{code:02x} is unknown or not plain data")
        operation(machine)
