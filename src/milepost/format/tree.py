"""The typed tree: nested Python state as strict JSON and back, without pickle and without loss.

JSON's own types stand as they are; anything else is an object with the key `$type`:

    {"$type": "tuple", "items": [1, 2]}
    {"$type": "dict", "pairs": [[0, "zero"]]}
    {"$type": "float", "value": "inf"}

Tensors, and whatever else belongs to torch, go through a `TensorSink` and come back through a
`TensorSource`; their tags begin with `torch.`. A value that has no exact form is refused, with
its key. Decoding builds values of the types listed in `tree_rules` and no others: no class is
looked up by a name from the document, and nothing in the document is called.

Not kept: the order of a set, the memory order of an array, the payload bits of a nan, and that
one list stands in two places (it is decoded as two lists). Order of keys is kept as far as the
JSON writer keeps it: write the result without sorting keys.
"""

from __future__ import annotations

from milepost.format.tree_decode import decode
from milepost.format.tree_encode import encode
from milepost.format.tree_records import (
    MAX_DEPTH,
    TAG_KEY,
    EnumValue,
    Json,
    Reference,
    TensorSink,
    TensorSource,
)

__all__ = [
    "MAX_DEPTH",
    "TAG_KEY",
    "EnumValue",
    "Json",
    "Reference",
    "TensorSink",
    "TensorSource",
    "decode",
    "encode",
]
