"""`extract-lora`: the difference of a fine-tune to its base, as an adapter of low rank."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from milepost.adapters.kinds import ADAPTER_STEM
from milepost.adapters.names import PREFIX
from milepost.errors import InvalidInputError
from milepost.hf.card import is_hub_id
from milepost.hf.conv1d import CONV1D_FAMILIES
from milepost.hf.expert_layouts import EXPERT_NAMES, NO_EXPERT_NAMES
from milepost.hf.fp32_names import is_norm
from milepost.storage.fileops import PathLike
from milepost.tools.carried import Carried
from milepost.tools.cast import refuse_quantised
from milepost.tools.merge_peft_base import BaseIndex
from milepost.tools.module_names import may_have_others, module_names
from milepost.tools.rewrite.cards import Relation, RelationKind
from milepost.tools.rewrite.dtypes import FLOATS, float_type, torch_type
from milepost.tools.rewrite.groups import Computed, Group, TensorSpec, passed
from milepost.tools.rewrite.options import RewriteOptions
from milepost.tools.rewrite.problems import Problems
from milepost.tools.rewrite.report import RewriteReport
from milepost.tools.rewrite.rewrite import Rewrite
from milepost.tools.rewrite.run import run_rewrite
from milepost.tools.rewrite.source import Source, SourceTensor, open_source

VERB = "extract-lora"
EXACT_NUMEL = 2**20
"""Up to this many elements a difference is decomposed exactly; above, by random projection."""
_EXACT_COPIES, _PROJECTED_COPIES = 20, 4
"""How often a difference in fp32 is in memory meanwhile."""
_OVERSAMPLED = 16
_ITERATIONS = 4
_SEED = 0
_PUT_TOGETHER = frozenset({"minimax", "minimax_m2", "mixtral", "olmoe", "qwen3_moe"})
"""Families of which peft puts factors of experts and routers together as banks, all of them: they
have no other modules of such names."""
_LEAVES_OF_EXPERTS = frozenset(
    {"gate", "router", "layer", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}
)
_CONV1D = frozenset({"c_attn", "c_fc", "c_proj", "q_attn"})
_EMBEDDINGS = re.compile(
    r"(?:.*\.)?(?:embed_tokens|wte|wpe|word_embeddings|position_embeddings|tok_embeddings)\.weight"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtractReport(RewriteReport):
    """`energy` is by tensor the share of the difference's squared norm that its factors keep;
    `left_out` are tensors that differ and are not in the adapter."""

    energy: dict[str, float] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()


def extract_lora(
    tuned: PathLike,
    base: PathLike,
    output: PathLike,
    *,
    rank: int,
    target_modules: Sequence[str] = (),
    save_modules: Sequence[str] = (),
    dtype: str | None = None,
    options: RewriteOptions | None = None,
) -> ExtractReport:
    """Write `tuned - base` as a LoRA adapter of `rank` that peft loads, the directory `output`.

    Each two-dimensional weight of a linear layer that differs (and whose module is one of
    `target_modules`, by its last name, where given) gets the factors that are nearest to its
    difference, in `dtype` (by default that of `tuned`). Modules in `save_modules`, by their last
    name, are stored whole. What else differs is in the notes: the adapter is without it. So is what
    peft does not find in families whose experts it knows in banks alone.

    `InvalidInputError` for models of different tensors or shapes, and where nothing differs; other
    errors: see `run_rewrite`.
    """
    if rank < 1:
        raise InvalidInputError(f"--rank {rank}: expected 1 or more")
    extraction = _Extraction(tuned, base, rank, target_modules, save_modules, dtype)
    report = run_rewrite(extraction.rewrite(), output, options)
    known = {each.name: getattr(report, each.name) for each in fields(RewriteReport)}
    return ExtractReport(**known, energy=extraction.energy, left_out=tuple(extraction.left_out))


class _Extraction:
    def __init__(
        self,
        tuned: PathLike,
        base: PathLike,
        rank: int,
        target_modules: Sequence[str],
        save_modules: Sequence[str],
        dtype: str | None,
    ) -> None:
        self._tuned, self._base = open_source(tuned), open_source(base)
        for source in (self._tuned, self._base):
            refuse_quantised(source, VERB)
            _refuse_adapter(source)
        self._of_tuned, self._of_base = BaseIndex(self._tuned), BaseIndex(self._base)
        self._modules = module_names(self._tuned)
        self._rank, self._dtype = rank, None if dtype is None else float_type(dtype)
        self._targets, self._saved = tuple(target_modules), tuple(save_modules)
        self._problems = Problems()
        self.energy: dict[str, float] = {}
        self.left_out: list[str] = []
        self._targeted: list[str] = []
        self._whole: list[str] = []

    def rewrite(self) -> Rewrite:
        groups: list[Group] = []
        for name, tensor in self._everything().items():
            other = self._of_base.tensor(name)
            if name in self._whole:
                continue
            if other is None:
                self._new(tensor, groups)
            elif other.shape != tensor.shape:
                self._problems.refuse(
                    f"{name}: {list(tensor.shape)} in {self._tuned.path}, {list(other.shape)} in "
                    f"{self._base.path}; a difference is one of equal shapes"
                )
            elif _differs(tensor, other):
                self._add(tensor, other, groups)
        missing = [name for name in self._base.tensors if self._of_tuned.tensor(name) is None]
        if missing:
            self._problems.refuse(
                f"{self._tuned.path}: has no {', '.join(missing[:5])} ({len(missing)} tensors), "
                "which the base has"
            )
        if not groups and not self._problems:
            self._problems.refuse(
                f"{self._tuned.path}: differs from {self._base.path} in nothing that an adapter "
                f"holds{self._told_left_out()}"
            )
        return self._made(groups)

    def _everything(self) -> dict[str, SourceTensor]:
        """All tensors of the fine-tune, and those that it ties and the base stores."""
        found = dict(self._tuned.tensors)
        for name in self._base.tensors:
            twin = self._of_tuned.tensor(name)
            if name not in found and twin is not None:
                found[name] = replace(twin, name=name)
        return found

    def _made(self, groups: list[Group]) -> Rewrite:
        read = {t.name for group in groups for t in group.sources if t.source is self._tuned}
        rewrite = Rewrite(
            verb=VERB,
            sources=[self._tuned, self._base],
            groups=groups,
            arguments={
                "rank": self._rank,
                "target_modules": list(self._targets),
                "save_modules": list(self._saved),
                "dtype": self._dtype,
            },
            relation=Relation(kind=RelationKind.ADAPTER, base_models=self._hub_ids()),
            dropped={
                name: "differs, and is not in the adapter"
                if name in self.left_out
                else "is that of the base"
                for name in self._tuned.tensors
                if name not in read
            },
            tied={},
            stem="adapter_model",
            counts={"factorised": len(self._targeted), "saved whole": len(self._whole)},
            problems=self._problems,
        )
        document = json.dumps(self._config(), indent=2).encode() + b"\n"
        rewrite.aux = Carried(documents={"adapter_config.json": document})
        rewrite.notes += self._told_of_names()
        if self.left_out:
            rewrite.notes.append(f"left out{self._told_left_out()}")
        rewrite.before_publish = lambda _: self._tell(rewrite)
        return rewrite

    def _told_of_names(self) -> list[str]:
        """What peft will not find, or may not."""
        notes = []
        if may_have_others(self._tuned) and not self._modules:
            notes.append(
                "names of modules are those of the tensors: transformers, which loads models of "
                "this kind under other names, could not be asked, and peft may not find them"
            )
        if not self._targeted:
            notes.append("peft loads no adapter without factors; merge-peft-adapters does")
        kinds = self._tuned.model_types
        has_experts = any(kind in EXPERT_NAMES or kind in NO_EXPERT_NAMES for kind in kinds)
        if not has_experts or not _PUT_TOGETHER.isdisjoint(kinds):
            return notes
        apart = [
            name
            for name in self._targeted
            if "expert" in name or name.rpartition(".")[2] in _LEAVES_OF_EXPERTS
        ]
        if apart:
            notes.append(
                f"peft loses the factors of {len(apart)} modules, such as {apart[0]}: with "
                f"transformers 5 it looks for experts, routers and MLPs of {kinds[0]} in banks; "
                "milepost merge-peft-adapters takes all of them"
            )
        return notes

    def _told_left_out(self) -> str:
        if not self.left_out:
            return ""
        more = "" if len(self.left_out) < 6 else f" and {len(self.left_out) - 5} more"
        return (
            f": {', '.join(self.left_out[:5])}{more} differ and are no weights of targeted linear "
            "layers (--save-modules stores modules whole)"
        )

    def _tell(self, rewrite: Rewrite) -> None:
        if not self.energy:
            return
        least = min(self.energy, key=lambda name: self.energy[name])
        mean = sum(self.energy.values()) / len(self.energy)
        rewrite.notes.append(
            f"factors of rank {self._rank} keep {mean:.2%} of the squared norm of a difference on "
            f"average, and {self.energy[least]:.2%} at least ({least})"
        )

    def _hub_ids(self) -> list[str]:
        name = self._base.config.get("_name_or_path")
        return [name] if isinstance(name, str) and is_hub_id(name) else []

    # ---- tensors

    def _new(self, tensor: SourceTensor, groups: list[Group]) -> None:
        module = tensor.name.rpartition(".")[0]
        if self._is_saved(module):
            self._save(tensor, groups)
            return
        self._problems.refuse(
            f"{tensor.name}: is in {self._tuned.path} and not in {self._base.path}; a new module "
            "is stored whole (--save-modules)"
        )

    def _is_saved(self, module: str) -> bool:
        return module.rpartition(".")[2] in self._saved

    def _save(self, tensor: SourceTensor, groups: list[Group]) -> None:
        """Store a tensor whole; for peft, which parts tied modules, under all its names."""
        aliases = [alias for alias, kept in self._of_tuned.tied.items() if kept == tensor.name]
        for name in (tensor.name, *aliases):
            groups.append(passed(tensor, name=PREFIX + self._modules.get(name, name)))
            self._whole.append(name)

    def _add(self, tensor: SourceTensor, other: SourceTensor, groups: list[Group]) -> None:
        module, _, leaf = tensor.name.rpartition(".")
        last = module.rpartition(".")[2]
        if self._is_saved(module):
            self._save(tensor, groups)
        elif self._is_linear(tensor, leaf) and (not self._targets or last in self._targets):
            groups.append(self._factors(tensor, other))
        else:
            self.left_out.append(tensor.name)

    def _is_linear(self, tensor: SourceTensor, leaf: str) -> bool:
        is_matrix = len(tensor.shape) == 2 and leaf == "weight" and tensor.dtype in FLOATS
        is_other = is_norm(tensor.name) or _EMBEDDINGS.fullmatch(tensor.name) is not None
        return is_matrix and not is_other

    def _factors(self, tensor: SourceTensor, other: SourceTensor) -> Group:
        """Both factors have all ranks, of which a small matrix leaves some zero: peft puts those of
        experts that lie one by one together, and reads no rank of one alone."""
        rank = min(self._rank, *tensor.shape)
        module = self._modules.get(tensor.name, tensor.name).removesuffix(".weight")
        self._targeted.append(module)
        dtype = self._dtype or tensor.dtype
        is_transposed = self._has_conv1d and module.rpartition(".")[2] in _CONV1D
        rows, columns = tensor.shape[::-1] if is_transposed else tensor.shape
        names = (f"{PREFIX}{module}.lora_A.weight", f"{PREFIX}{module}.lora_B.weight")

        def make(given: dict[str, Tensor]) -> dict[str, Tensor]:
            delta = given["tuned"].float().sub_(given["base"].float())
            if not bool(delta.isfinite().all()):
                raise InvalidInputError(f"{tensor.name}: has values that are not finite")
            delta = delta.T if is_transposed else delta
            left, right, kept = factorised(delta, rank)
            self.energy[tensor.name] = kept
            wanted = torch_type(dtype)
            more = self._rank - rank
            return {
                names[0]: pad(right, (0, 0, 0, more)).to(wanted),
                names[1]: pad(left, (0, more)).to(wanted),
            }

        return Computed(
            inputs={"tuned": tensor, "base": other},
            outputs=(
                TensorSpec(name=names[0], dtype=dtype, shape=(self._rank, columns)),
                TensorSpec(name=names[1], dtype=dtype, shape=(rows, self._rank)),
            ),
            make=make,
            scratch_nbytes=4 * _copies(prod(tensor.shape)) * prod(tensor.shape),
        )

    @property
    def _has_conv1d(self) -> bool:
        """Whether layers of the family are Conv1D, which store inputs first."""
        return not CONV1D_FAMILIES.isdisjoint(self._tuned.model_types)

    # ---- configuration

    def _config(self) -> dict[str, Any]:
        names = self._hub_ids()
        path = self._base.path
        base = names[0] if names else str(path if path.is_dir() else path.parent)
        saved = sorted({name.rpartition(".")[0].rpartition(".")[2] for name in self._whole})
        return {
            "peft_type": "LORA",
            "base_model_name_or_path": base,
            "task_type": "CAUSAL_LM" if self._is_causal() else None,
            "r": self._rank,
            "lora_alpha": self._rank,
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": self._has_conv1d,
            "inference_mode": True,
            "target_modules": sorted(self._targeted),
            "modules_to_save": saved or None,
        }

    def _is_causal(self) -> bool:
        names = self._tuned.config.get("architectures") or []
        return any("ForCausalLM" in str(name) for name in names)


def _refuse_adapter(source: Source) -> None:
    if source.stem == ADAPTER_STEM:
        raise InvalidInputError(
            f"{source.path}: is an adapter already; a difference is one of whole models (milepost "
            "merge-peft-adapters makes one)",
            path=source.path,
        )


def _copies(numel: int) -> int:
    return _EXACT_COPIES if numel <= EXACT_NUMEL else _PROJECTED_COPIES


def _differs(tensor: SourceTensor, other: SourceTensor) -> bool:
    """Whether two tensors have other values; read band by band."""
    rows = tensor.shape[0] if tensor.shape else 0
    step = max(1, 2**20 // max(1, tensor.row_nbytes))
    if not tensor.shape:
        return not torch.equal(*_pair(tensor.read(), other.read()))
    bands = [(first, min(first + step, rows)) for first in range(0, rows, step)]
    return any(not torch.equal(*_pair(tensor.read(band), other.read(band))) for band in bands)


def _pair(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    if first.dtype == second.dtype:
        return first, second
    return first.double(), second.double()


def factorised(delta: Tensor, rank: int) -> tuple[Tensor, Tensor, float]:
    """The nearest `left @ right` of this rank to `delta` [rows, columns], fp32, and the share of
    its squared norm that they keep. The same on every run."""
    if delta.numel() <= EXACT_NUMEL or rank + _OVERSAMPLED >= min(delta.shape):
        left, values, right = torch.linalg.svd(delta, full_matrices=False)
    else:
        left, values, right = _projected(delta, rank + _OVERSAMPLED)
    left, values, right = left[:, :rank], values[:rank], right[:rank]
    rows = torch.split(delta, max(1, 2**18 // delta.shape[1]))
    whole = sum(float(each.square().sum(dtype=torch.float64)) for each in rows)
    kept = float(values.square().sum(dtype=torch.float64)) / whole if whole else 1.0
    root = values.sqrt()
    return left * root, root.unsqueeze(1) * right, min(kept, 1.0)


def _projected(delta: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """The largest singular values and vectors by subspace iteration from seeded noise."""
    generator = torch.Generator().manual_seed(_SEED)
    basis = torch.linalg.qr(delta @ torch.randn(delta.shape[1], width, generator=generator))[0]
    for _ in range(_ITERATIONS):
        basis = torch.linalg.qr(delta @ torch.linalg.qr(delta.T @ basis)[0])[0]
    left, values, right = torch.linalg.svd(basis.T @ delta, full_matrices=False)
    return basis @ left, values, right
