"""The container: its header, and where every tensor lies. Known before a tensor is read."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from milepost.tools.gguf.hyperparameters import Keys
from milepost.tools.gguf.package import gguf_package
from milepost.tools.gguf.tensors import GgufTensor, Kind

_FILE_TYPES = {
    Kind.F32: "ALL_F32",
    Kind.F16: "MOSTLY_F16",
    Kind.BF16: "MOSTLY_BF16",
    Kind.Q8_0: "MOSTLY_Q8_0",
}
_CHAT_TEMPLATE = "tokenizer.chat_template"


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """`header` has all keys and the list of tensors, padded to where data begins. `offsets` are the
    first bytes of the tensors in the file, which has `nbytes`."""

    header: bytes
    offsets: tuple[int, ...]
    nbytes: int


def lay_out(arch: str, keys: Keys, kind: Kind, tensors: Sequence[GgufTensor]) -> Container:
    """The header with these keys behind those of the format itself."""
    gguf = gguf_package()
    writer = gguf.GGUFWriter(None, arch)
    writer.add_type("model")
    writer.add_file_type(gguf.LlamaFileType[_FILE_TYPES[kind]])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for key, value in keys.items():
        _add(writer, key, value)
    for tensor in tensors:
        element = gguf.GGMLQuantizationType[tensor.kind.value]
        writer.add_tensor_info(tensor.name, tensor.shape, None, tensor.nbytes, raw_dtype=element)
    header = _header(gguf, writer)
    header += bytes(_padding(len(header), writer.data_alignment))
    offsets, end = [], len(header)
    for tensor in tensors:
        offsets.append(end)
        end += tensor.nbytes
        end += _padding(end, writer.data_alignment)
    return Container(header=header, offsets=tuple(offsets), nbytes=end)


def _padding(position: int, alignment: int) -> int:
    return -position % alignment


def _header(gguf: Any, writer: Any) -> bytes:
    """What the writer puts before the data, into memory: Milepost writes the file itself."""
    buffer = io.BytesIO()
    writer.fout = [buffer]
    writer.state = gguf.gguf_writer.WriterState.EMPTY
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    return buffer.getvalue()


def _add(writer: Any, key: str, value: Any) -> None:
    if key == _CHAT_TEMPLATE:
        writer.add_chat_template(value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def read_back(path: str, tensors: Sequence[GgufTensor], container: Container) -> list[str]:
    """What a reader of the format finds otherwise than it was planned; empty when all is right."""
    gguf = gguf_package()
    found: Mapping[str, Any] = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    problems = []
    for tensor, offset in zip(tensors, container.offsets, strict=True):
        other = found.get(tensor.name)
        if other is None:
            problems.append(f"{tensor.name} is not there")
            continue
        shape = tuple(int(size) for size in reversed(other.shape))
        there = (shape, other.tensor_type.name, int(other.data_offset))
        if there != (tensor.shape, tensor.kind.value, offset):
            problems.append(f"{tensor.name} is {there}")
    if len(found) != len(tensors):
        problems.append(f"{len(found)} tensors, {len(tensors)} were written")
    return problems
