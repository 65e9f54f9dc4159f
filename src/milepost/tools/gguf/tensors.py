"""Which tensors a GGUF file has, and which bytes of the source each is made of: from headers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import prod

from milepost.tools.gguf.families import Family
from milepost.tools.gguf.hyperparameters import Hyperparameters
from milepost.tools.rewrite.dtypes import FLOATS
from milepost.tools.rewrite.problems import Problems
from milepost.tools.rewrite.source import SourceTensor

QUANTISED_BLOCK = 32
_Q8_0_BLOCK_NBYTES = 34
_SHOWN = 5


class Kind(StrEnum):
    """Element types by GGUF's names."""

    F32 = "F32"
    F16 = "F16"
    BF16 = "BF16"
    Q8_0 = "Q8_0"

    def nbytes(self, numel: int) -> int:
        """Bytes of so many elements; of Q8_0 a multiple of 32 elements."""
        if self is Kind.Q8_0:
            return numel // QUANTISED_BLOCK * _Q8_0_BLOCK_NBYTES
        return numel * (4 if self is Kind.F32 else 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """The elements `[first, last)` of an input tensor, in its memory order."""

    tensor: SourceTensor
    first: int
    last: int

    @property
    def numel(self) -> int:
        return self.last - self.first

    @property
    def itemsize(self) -> int:
        return self.tensor.nbytes // max(1, prod(self.tensor.shape))


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """A tensor of the output: `segments` one after the other, or the `values` of a small one.

    `shape` has torch's order. `paired_rows` is the number of rows of a head of which the two halves
    are interleaved; 0 leaves rows in their order.
    """

    name: str
    shape: tuple[int, ...]
    kind: Kind
    segments: tuple[Segment, ...] = ()
    values: tuple[float, ...] = ()
    paired_rows: int = 0

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.kind.nbytes(self.numel)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlan:
    """`dropped` are input tensors that go nowhere, with the reason; `narrow` are tensors whose rows
    Q8_0 cannot divide, which are F16. `head` is the stored head that must equal the embedding."""

    tensors: tuple[GgufTensor, ...]
    dropped: Mapping[str, str]
    narrow: tuple[str, ...] = ()
    head: SourceTensor | None = None


def plan_tensors(
    tensors: Mapping[str, SourceTensor],
    tied: Mapping[str, str],
    family: Family,
    sizes: Hyperparameters,
    kind: Kind,
    problems: Problems,
) -> TensorPlan:
    """Name every tensor of the output, and every tensor of the source that does not go there.

    Matrices have the type `kind`; vectors and routers are F32. What lacks, has another shape than
    the configuration says, or is not known is a problem.
    """
    return _Planner(tensors, tied, family, sizes, kind, problems).plan()


class _Planner:
    def __init__(
        self,
        tensors: Mapping[str, SourceTensor],
        tied: Mapping[str, str],
        family: Family,
        sizes: Hyperparameters,
        kind: Kind,
        problems: Problems,
    ) -> None:
        self._tensors, self._tied = tensors, tied
        self._family, self._sizes, self._kind = family, sizes, kind
        self._problems = problems
        self._out: list[GgufTensor] = []
        self._read: set[str] = set()
        self._missing: list[str] = []
        self._narrow: list[str] = []

    def plan(self) -> TensorPlan:
        sizes = self._sizes
        table = (sizes.vocabulary, sizes.hidden)
        self._add("token_embd.weight", "model.embed_tokens.weight", table)
        factors = sizes.rope_factors()
        if factors is not None:
            self._out.append(
                GgufTensor(
                    name="rope_freqs.weight",
                    shape=(len(factors),),
                    kind=Kind.F32,
                    values=tuple(factors),
                )
            )
        for layer in range(sizes.layers):
            self._add_attention(f"blk.{layer}", f"model.layers.{layer}")
            if self._family.has_experts:
                self._add_experts(f"blk.{layer}", f"model.layers.{layer}.mlp")
            else:
                inner = sizes.feed_forward
                self._add_mlp(f"blk.{layer}.ffn", "", f"model.layers.{layer}.mlp", inner)
        self._add("output_norm.weight", "model.norm.weight", (sizes.hidden,))
        head = self._add_head(table)
        dropped = self._dropped(head)
        self._tell_problems(dropped)
        return TensorPlan(
            tensors=tuple(self._out), dropped=dropped, narrow=tuple(self._narrow), head=head
        )

    # ---- parts of a layer

    def _add_attention(self, block: str, layer: str) -> None:
        sizes, family = self._sizes, self._family
        hidden, queries = sizes.hidden, sizes.heads * sizes.head_dim
        keys = sizes.kv_heads * sizes.head_dim
        self._add(f"{block}.attn_norm.weight", f"{layer}.input_layernorm.weight", (hidden,))
        pairs = sizes.head_dim if family.pairs_rope else 0
        for short, rows, columns, paired in (
            ("q", queries, hidden, pairs),
            ("k", keys, hidden, pairs),
            ("v", keys, hidden, 0),
            ("o", hidden, queries, 0),
        ):
            name = "output" if short == "o" else short
            source = f"{layer}.self_attn.{short}_proj"
            self._linear(f"{block}.attn_{name}", source, (rows, columns), paired)
        if family.has_head_norms:
            for short in "qk":
                source = f"{layer}.self_attn.{short}_norm.weight"
                self._add(f"{block}.attn_{short}_norm.weight", source, (sizes.head_dim,))
        source = f"{layer}.post_attention_layernorm.weight"
        self._add(f"{block}.ffn_norm.weight", source, (hidden,))

    def _add_mlp(self, prefix: str, suffix: str, mlp: str, inner: int) -> None:
        hidden = self._sizes.hidden
        for short, shape in (
            ("gate", (inner, hidden)),
            ("up", (inner, hidden)),
            ("down", (hidden, inner)),
        ):
            self._linear(f"{prefix}_{short}{suffix}", f"{mlp}.{short}_proj", shape)

    def _add_experts(self, block: str, mlp: str) -> None:
        sizes = self._sizes
        count, inner, hidden = sizes.experts, sizes.expert_feed_forward, sizes.hidden
        router = (count, hidden)
        self._add(f"{block}.ffn_gate_inp.weight", f"{mlp}.gate.weight", router, kind=Kind.F32)
        for short, shape in (
            ("gate", (inner, hidden)),
            ("up", (inner, hidden)),
            ("down", (hidden, inner)),
        ):
            segments = self._experts(mlp, short, shape)
            if segments:
                self._put(f"{block}.ffn_{short}_exps.weight", (count, *shape), segments)
        if self._family.has_shared_expert:
            shared = sizes.shared_feed_forward
            self._add_mlp(f"{block}.ffn", "_shexp", f"{mlp}.shared_expert", shared)
            gate = f"{mlp}.shared_expert_gate.weight"
            name = f"{block}.ffn_gate_inp_shexp.weight"  # a vector in GGUF
            self._add(name, gate, (1, hidden), kind=Kind.F32, written=(hidden,))

    def _experts(self, mlp: str, short: str, shape: tuple[int, int]) -> tuple[Segment, ...]:
        """The projection of all experts, stacked: out of a fused bank, or expert by expert."""
        count = self._sizes.experts
        fused = f"{mlp}.experts.{'down_proj' if short == 'down' else 'gate_up_proj'}"
        if fused not in self._tensors:
            names = [f"{mlp}.experts.{number}.{short}_proj.weight" for number in range(count)]
            found = [self._take(name, shape) for name in names]
            return tuple(_whole(tensor) for tensor in found if tensor is not None)
        halves = 1 if short == "down" else 2
        bank = self._take(fused, (count, halves * shape[0], shape[1]))
        if bank is None:
            return ()
        step, start = prod(shape), prod(shape) if short == "up" else 0
        return tuple(
            Segment(tensor=bank, first=first, last=first + step)
            for first in range(start, count * halves * step, halves * step)
        )

    def _add_head(self, table: tuple[int, int]) -> SourceTensor | None:
        """The head, unless it is the embedding; then a stored copy of it, if there is one."""
        name, embedding = "lm_head.weight", "model.embed_tokens.weight"
        if self._sizes.is_tied:
            return self._take(name, table) if name in self._tensors else None
        if name in self._tensors or self._tied.get(name) != embedding:
            self._add("output.weight", name, table)
        return None

    # ---- single tensors

    def _linear(self, out: str, source: str, shape: tuple[int, int], paired: int = 0) -> None:
        self._add(f"{out}.weight", f"{source}.weight", shape, paired=paired)
        leaf, bias = source.rpartition(".")[2], f"{source}.bias"
        optional = leaf in self._family.may_have_biases and bias in self._tensors
        is_expert = "shared_expert" in source
        if optional or (leaf in self._family.biases and not is_expert):
            self._add(f"{out}.bias", bias, shape[:1], paired=paired)

    def _add(
        self,
        out: str,
        source: str,
        shape: tuple[int, ...],
        *,
        kind: Kind | None = None,
        paired: int = 0,
        written: tuple[int, ...] | None = None,
    ) -> None:
        tensor = self._take(source, shape)
        if tensor is not None:
            self._put(out, written or shape, (_whole(tensor),), kind=kind, paired=paired)

    def _put(
        self,
        name: str,
        shape: tuple[int, ...],
        segments: tuple[Segment, ...],
        *,
        kind: Kind | None = None,
        paired: int = 0,
    ) -> None:
        chosen = kind or (Kind.F32 if len(shape) == 1 else self._kind)
        if chosen is Kind.Q8_0 and shape[-1] % QUANTISED_BLOCK:
            chosen = Kind.F16
            self._narrow.append(name)
        self._out.append(
            GgufTensor(name=name, shape=shape, kind=chosen, segments=segments, paired_rows=paired)
        )

    def _take(self, name: str, shape: tuple[int, ...]) -> SourceTensor | None:
        """The tensor, read from now on; None with a problem when it is not what is expected."""
        tensor = self._tensors.get(name)
        if tensor is None:
            self._missing.append(name)
            return None
        self._read.add(name)
        if tensor.shape != shape:
            self._problems.refuse(
                f"{name}: shape {tensor.shape} in the checkpoint, {shape} by config.json"
            )
            return None
        if tensor.dtype not in FLOATS:
            self._problems.refuse(
                f"{name}: {tensor.dtype} values mean nothing without their scales; dequantise the "
                "checkpoint first (milepost dequantize)"
            )
            return None
        return tensor

    # ---- what is left

    def _dropped(self, head: SourceTensor | None) -> dict[str, str]:
        found = {}
        if head is not None:
            found[head.name] = "equal to model.embed_tokens.weight, to which the model ties it"
        for name in self._tensors:
            if name.endswith(".rotary_emb.inv_freq"):
                found[name] = "computed from rope.freq_base by every reader"
        return found

    def _tell_problems(self, dropped: Mapping[str, str]) -> None:
        unknown = [n for n in self._tensors if n not in self._read and n not in dropped]
        for names, what in (
            (self._missing, "that the model needs are not there"),
            (unknown, f"have no place in a GGUF file of {self._family.arch}"),
        ):
            if names:
                more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
                listed = ", ".join(names[:_SHOWN])
                self._problems.refuse(f"{len(names)} tensors {what}: {listed}{more}")


def _whole(tensor: SourceTensor) -> Segment:
    return Segment(tensor=tensor, first=0, last=prod(tensor.shape))
