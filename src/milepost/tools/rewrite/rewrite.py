"""A rewrite: what a verb wants done, stated from headers alone before anything is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, TypeAlias

from milepost.checkpointing.files import PlannedFile
from milepost.format.manifest import Manifest
from milepost.plan.part_names import Numbered, PartNaming
from milepost.tools.carried import Carried, carried_files
from milepost.tools.rewrite.cards import Relation
from milepost.tools.rewrite.groups import Copied, Group
from milepost.tools.rewrite.lone_adapter import extra_files
from milepost.tools.rewrite.problems import Problems
from milepost.tools.rewrite.source import Source

EditConfig: TypeAlias = Callable[[dict[str, Any]], list[str]]
"""Changes the content of config.json in place and returns what is to be told about it."""


class Parts(Enum):
    """How tensors are put into files."""

    SPLIT = "split"
    """Anew, by `max_shard_size`, in the order of the groups."""
    KEEP = "keep"
    """In the files and at the offsets of the first source. Names, dtypes and shapes must be the
    same; parts of which no tensor changes are copied or linked as they are."""


@dataclass(slots=True, kw_only=True)
class Rewrite:
    """Everything that a verb decides.

    `sources[0]` is the one whose files beside the weights are carried, and whose step, epoch and
    ties the output has; `aux` replaces what is carried. Each of its tensors must be read by a group
    or stand in `dropped`, with the reason. `groups` are written in their order. `problems` is what
    the verb found wrong; the frame adds its own and raises them together.

    With `states_dtype`, config.json states the float type of most weights even where no type has
    changed: it may have said another one.

    Files of `Parts.SPLIT` are called as `naming` says; those of experts by rank have one for each.
    `stem` is theirs, by default that of the first source where loaders know it, else `model`.
    `arguments`, plain JSON values, stand in the provenance of the output. `counts` are told in the
    report (`{"experts": 128}`), `notes` too. `relation` is written into the card. `extra` are
    further files of the output; `edit_manifest` may change the manifest before files are listed in
    it. `before_publish` gets the complete directory under its hidden name; what it raises keeps it
    from being published, and it may add to `counts` and `notes`.
    """

    verb: str
    sources: Sequence[Source]
    groups: Sequence[Group]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    aux: Carried | None = None
    edit_config: EditConfig | None = None
    states_dtype: bool = False
    relation: Relation | None = None
    dropped: Mapping[str, str] = field(default_factory=dict)
    tied: Mapping[str, str] | None = None
    parts: Parts = Parts.SPLIT
    naming: PartNaming = field(default_factory=Numbered)
    stem: str = ""
    counts: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: Problems = field(default_factory=Problems)
    provenance: Mapping[str, Any] = field(default_factory=dict)
    extra: Sequence[PlannedFile] = ()
    edit_manifest: Callable[[Manifest], None] | None = None
    before_publish: Callable[[Path], None] | None = None

    def __post_init__(self) -> None:
        self.stem = self.stem or self.sources[0].stem

    @property
    def ties(self) -> dict[str, str]:
        """Alias to the name that has the tensor, in the output."""
        return dict(self.sources[0].tied if self.tied is None else self.tied)

    def carried(self) -> Carried:
        """Files beside the weights; taken from the first source when the verb gives none."""
        if self.aux is None:
            checkpoint = self.sources[0].checkpoint
            self.aux = carried_files(checkpoint)
            for name in extra_files(checkpoint) if self.keeps_names else []:
                self.aux.paths[name] = checkpoint.path / name
                self.aux.roles[name] = "weights"
        return self.aux

    @property
    def keeps_names(self) -> bool:
        """Whether the output has the tensors of the first source by name and shape."""
        made = {spec.name: tuple(spec.shape) for group in self.groups for spec in group.outputs}
        return made == {name: tensor.shape for name, tensor in self.sources[0].tensors.items()}

    @property
    def unchanged(self) -> set[str]:
        """Output tensors that are input tensors as they were."""
        return {g.output.name for g in self.groups if isinstance(g, Copied) and g.is_unchanged}
