"""Random state: python's `random`, numpy's global, torch's CPU and every accelerator present."""

from __future__ import annotations

import importlib.util
import random
import struct
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict

from milepost.errors import FormatError, InvalidInputError
from milepost.format import strictjson, tree

if TYPE_CHECKING:
    import torch

_Setter: TypeAlias = Callable[[], object]


class RngState(TypedDict):
    """Plain values and uint8 CPU tensors: the typed tree stores it as it is."""

    python: tuple[Any, ...]  # random.getstate()
    numpy: dict[str, Any] | None  # numpy.random.get_state(legacy=False); None without numpy
    torch: torch.Tensor
    devices: dict[str, torch.Tensor]  # "cuda:0" -> state of its default generator


def capture_rng() -> RngState:
    """The state of every generator of this process; none of them advances."""
    import torch

    return RngState(
        python=random.getstate(),
        numpy=_numpy_state(),
        torch=torch.get_rng_state(),
        devices={name: get() for name, (get, _) in _devices().items()},
    )


def restore_rng(state: RngState) -> list[str]:
    """Set every generator to `state`; returns a line for each one that could not be set.

    All parts are tried on generators of their own first: FormatError names the part that is
    malformed, and then no generator of the process has changed. Call it last in a load: making
    the iterator of a data loader draws from the global generators.
    """
    setters: list[_Setter] = []
    skipped: list[str] = []
    for check in (_check_python, _check_numpy, _check_torch, _check_devices):
        check(state, setters, skipped)
    for setter in setters:
        setter()
    return skipped


def _malformed(part: str, problem: object) -> FormatError:
    return FormatError(
        f"random state of {part}: {problem}; nothing was restored, "
        "load without random state or from another checkpoint"
    )


def _check_python(state: RngState, setters: list[_Setter], skipped: list[str]) -> None:
    try:
        random.Random().setstate(state["python"])
    except (TypeError, ValueError, OverflowError, KeyError) as e:
        raise _malformed("python", e) from e
    setters.append(partial(random.setstate, state["python"]))


def _numpy_state() -> dict[str, Any] | None:
    if importlib.util.find_spec("numpy") is None:
        return None
    import numpy as np

    return dict(np.random.get_state(legacy=False))


def _check_numpy(state: RngState, setters: list[_Setter], skipped: list[str]) -> None:
    saved, here = state.get("numpy"), _numpy_state()
    if saved is None or here is None:
        if saved is not here:
            side = "the checkpoint has no state of it" if saved is None else "it is not installed"
            skipped.append(f"numpy: {side}")
        return
    import numpy as np

    try:
        name = saved["bit_generator"]
        if name != here["bit_generator"]:
            skipped.append(
                f"numpy: the checkpoint holds {name!r:.40}, this process uses "
                f"{here['bit_generator']}; call numpy.random.set_bit_generator first"
            )
            return
        trial = np.random.RandomState(getattr(np.random, here["bit_generator"])())
        trial.set_state(saved)
    except (TypeError, ValueError, OverflowError, LookupError) as e:
        raise _malformed("numpy", e) from e
    setters.append(partial(np.random.set_state, saved))


def _check_torch(state: RngState, setters: list[_Setter], skipped: list[str]) -> None:
    import torch

    saved = _on_trial("torch", state.get("torch"), "cpu")
    setters.append(partial(torch.set_rng_state, saved))


def _check_devices(state: RngState, setters: list[_Setter], skipped: list[str]) -> None:
    saved, here = state.get("devices"), _devices()
    if not isinstance(saved, dict):
        raise _malformed("the accelerators", f"expected a dict, found {type(saved).__name__}")
    skipped.extend(f"{name}: this process does not see it" for name in saved.keys() - here.keys())
    skipped.extend(f"{name}: the checkpoint has no state of it" for name in here.keys() - saved)
    skipped.sort()
    for name in sorted(saved.keys() & here.keys()):
        setters.append(partial(here[name][1], _on_trial(name, saved[name], name)))


def _on_trial(part: str, saved: object, device: str) -> torch.Tensor:
    """`saved` as a CPU tensor, after a generator of its own took it."""
    import torch

    if not isinstance(saved, torch.Tensor) or saved.dtype != torch.uint8:
        raise _malformed(part, f"expected a uint8 tensor, found {_described(saved)}")
    saved = saved.detach().cpu().contiguous()
    try:
        torch.Generator(device=device).set_state(saved)
    except (RuntimeError, TypeError) as e:
        raise _malformed(part, str(e).partition("\n")[0]) from e
    return saved


def _described(value: object) -> str:
    dtype = getattr(value, "dtype", None)
    return type(value).__name__ if dtype is None else f"{type(value).__name__} of {dtype}"


def _devices() -> dict[str, tuple[Callable[[], torch.Tensor], Callable[[torch.Tensor], object]]]:
    """Getter and setter of the default generator of every accelerator this process sees."""
    import torch

    if not torch.accelerator.is_available():
        return {}
    kind = torch.accelerator.current_accelerator()
    assert kind is not None, "an available accelerator has a device type"
    module: Any = torch.get_device_module(kind.type)
    if kind.type == "mps":  # one device, and its functions take no index
        return {"mps": (module.get_rng_state, module.set_rng_state)}
    return {
        f"{kind.type}:{i}": (
            partial(module.get_rng_state, i),
            partial(module.set_rng_state, device=i),
        )
        for i in range(torch.accelerator.device_count())
    }


_MAGIC = b"MPRNG001"
_LENGTH = struct.Struct("<Q")
_MT_WORDS = 624
_PYTHON = struct.Struct(f"<{_MT_WORDS + 1}I?d")  # words and position, gauss_next
_NUMPY = struct.Struct(f"<{_MT_WORDS}II?d")  # words, position, has_gauss, gauss
_ROUND_NBYTES = 256


def pack_rng(state: RngState) -> bytes:
    """`state` as a self-describing blob: a magic, the length of what follows, a typed tree.

    Equal states give equal bytes. The length is the same for every state of the same kinds of
    generators, so that the rows of several ranks line up; zeros may be appended.
    """
    try:
        content = {
            "python": _pack_python(state["python"]),
            "numpy": _pack_numpy(state["numpy"]),
            "torch": _tensor_bytes(state["torch"]),
            "devices": {k: _tensor_bytes(state["devices"][k]) for k in sorted(state["devices"])},
        }
    except (struct.error, TypeError, ValueError, LookupError) as e:
        raise InvalidInputError(f"this is no state from capture_rng(): {e}") from e
    text = strictjson.dumps(tree.encode(content))
    blob = _MAGIC + _LENGTH.pack(len(text)) + text
    return blob + bytes(-len(blob) % _ROUND_NBYTES)


def unpack_rng(blob: bytes | bytearray | memoryview, where: str) -> RngState:
    """What `pack_rng` was given; FormatError, beginning with `where`, for anything else."""
    import torch

    raw = bytes(blob)
    start = len(_MAGIC) + _LENGTH.size
    if raw[: len(_MAGIC)] != _MAGIC or len(raw) < start:
        raise FormatError(f"{where}: random state begins with {raw[:8]!r}, expected {_MAGIC!r}")
    end = start + _LENGTH.unpack_from(raw, len(_MAGIC))[0]
    if end > len(raw) or raw[end:].strip(b"\0"):
        raise FormatError(f"{where}: random state ends at byte {end}, of {len(raw)} bytes")
    content = tree.decode(strictjson.loads(raw[start:end], where), None, where=where)
    try:
        return RngState(
            python=_unpack_python(content["python"]),
            numpy=_unpack_numpy(content["numpy"]),
            torch=torch.frombuffer(bytearray(content["torch"]), dtype=torch.uint8),
            devices={
                name: torch.frombuffer(bytearray(data), dtype=torch.uint8)
                for name, data in content["devices"].items()
            },
        )
    except (struct.error, TypeError, ValueError, LookupError, AttributeError) as e:
        raise FormatError(f"{where}: random state is malformed: {e}") from e


def _tensor_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().cpu().numpy().tobytes())


def _pack_python(state: tuple[Any, ...]) -> dict[str, Any]:
    version, words, gauss = state
    return {"version": version, "mt": _PYTHON.pack(*words, gauss is not None, gauss or 0.0)}


def _unpack_python(packed: dict[str, Any]) -> tuple[Any, ...]:
    *words, has_gauss, gauss = _PYTHON.unpack(packed["mt"])
    return (packed["version"], tuple(words), gauss if has_gauss else None)


def _pack_numpy(state: dict[str, Any] | None) -> dict[str, Any] | None:
    if state is None or state["bit_generator"] != "MT19937":
        return state
    key, position = state["state"]["key"], state["state"]["pos"]
    fields = (*key.tolist(), position, state["has_gauss"], state["gauss"])
    return {"bit_generator": "MT19937", "mt": _NUMPY.pack(*fields)}


def _unpack_numpy(packed: dict[str, Any] | None) -> dict[str, Any] | None:
    if packed is None or "mt" not in packed:
        return packed
    import numpy as np

    *words, position, has_gauss, gauss = _NUMPY.unpack(packed["mt"])
    return {
        "bit_generator": packed["bit_generator"],
        "state": {"key": np.array(words, np.uint32), "pos": position},
        "has_gauss": int(has_gauss),
        "gauss": gauss,
    }


def seed_everything(seed: int) -> None:
    """Seed python, numpy's global generator, and torch on every device, from one number."""
    import torch

    random.seed(seed)
    if importlib.util.find_spec("numpy") is not None:
        import numpy as np

        np.random.seed(seed % 2**32)
    torch.manual_seed(seed % 2**63)
