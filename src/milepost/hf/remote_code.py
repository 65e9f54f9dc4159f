"""The Python modules of a remote-code model: found, read and copied, never executed.

A custom model names its modules in `auto_map` (`{"AutoConfig": "configuration_x.XConfig"}`); they
import each other relatively. Without every one of them the directory cannot be loaded.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from milepost.hf.foreign_calls import attempt
from milepost.hf.live import live_class, source_directory

_MODULE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_\-]*(\.[A-Za-z0-9_][A-Za-z0-9_\-]*)*")
_NOT_COPIED = ("transformers.", "tokenizers.", "__main__")


@dataclass(slots=True, kw_only=True)
class Modules:
    """Modules by relative file name, and what could not be found or read."""

    files: dict[str, bytes] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def names(self) -> set[str]:
        """The dotted names of the modules."""
        return {name.removesuffix(".py").replace("/", ".") for name in self.files}


def local_auto_map(auto_map: Mapping[str, Any], present: Collection[str]) -> dict[str, Any]:
    """`auto_map` without the `owner/name--` prefix of a Hub repository, where the file is present.

    >>> local_auto_map({"AutoModel": "someone/x--modeling_x.XModel"}, {"modeling_x"})
    {'AutoModel': 'modeling_x.XModel'}
    """
    return {key: _local(value, present) for key, value in auto_map.items()}


def _local(reference: Any, present: Collection[str]) -> Any:
    if isinstance(reference, str):
        name = reference.rpartition("--")[2]
        return name if name.rpartition(".")[0] in present else reference
    if isinstance(reference, list | tuple):
        return [_local(item, present) for item in reference]
    if isinstance(reference, Mapping):
        return local_auto_map(reference, present)
    return reference


def module_names(auto_map: Any) -> set[str]:
    """The modules that an auto_map, or a value in one, names."""
    if isinstance(auto_map, str):
        return {auto_map.rpartition("--")[2].rpartition(".")[0]} - {""}
    if isinstance(auto_map, Mapping):
        auto_map = list(auto_map.values())
    if isinstance(auto_map, list | tuple):
        return {name for item in auto_map for name in module_names(item)}
    return set()


def live_auto_map(things: Iterable[Any]) -> dict[str, str]:
    """auto_map entries of live objects whose class was registered for an Auto class."""
    found = {}
    for cls in _classes(things):
        auto_class = getattr(cls, "_auto_class", None)
        if isinstance(auto_class, str) and not cls.__module__.startswith(_NOT_COPIED):
            found[auto_class] = f"{cls.__module__.rpartition('.')[2]}.{cls.__name__}"
    return found


def collect_modules(names: Iterable[str], things: Sequence[Any]) -> Modules:
    """Each module of `names`, with all that they import relatively.

    `things` are the live model, configuration and processing class: their own module files come
    first, because that is the code that ran; then the directories they were loaded from.
    """
    modules = Modules()
    directories = list(dict.fromkeys(_directories(things)))
    for name in sorted(names):
        if not _MODULE.fullmatch(name):
            modules.notes.append(f"auto_map: {name!r} is not the name of a module; not copied")
        elif not _add(modules, name, directories):
            looked = ", ".join(str(d) for d in directories) or "no directory"
            modules.notes.append(
                f"auto_map: {name}.py was not found (looked in {looked}); without it the custom "
                f"code cannot be loaded: copy it beside config.json"
            )
    return modules


def _classes(things: Iterable[Any]) -> Iterator[type]:
    for thing in things:
        if thing is not None:
            yield live_class(thing) or type(thing)


def _directories(things: Sequence[Any]) -> Iterator[Path]:
    for cls in _classes(things):
        file = getattr(sys.modules.get(cls.__module__), "__file__", None)
        if file and not cls.__module__.startswith(_NOT_COPIED):
            yield Path(file).parent
    for thing in things:
        source = source_directory(thing)
        if source is not None:
            yield source


def _add(modules: Modules, name: str, directories: Sequence[Path]) -> bool:
    """Add module `name` and what it imports, from the first directory that has it."""
    for directory in directories:
        for relative in (_file_of(name), f"{name.replace('.', '/')}/__init__.py"):
            if (directory / relative).is_file():
                _add_file(modules, directory, relative)
                return True
    return False


def _file_of(name: str) -> str:
    return f"{name.replace('.', '/')}.py"


def _add_file(modules: Modules, directory: Path, relative: str) -> None:
    if relative in modules.files:
        return
    source = (directory / relative).read_bytes()
    modules.files[relative] = source
    tree, problem = attempt(lambda: ast.parse(source))
    if tree is None:
        modules.notes.append(f"{relative}: copied, but its imports cannot be read ({problem})")
        return
    for needed in sorted(relative_imports(tree, relative)):
        _add(modules, needed, [directory])


def relative_imports(tree: ast.AST, relative: str) -> set[str]:
    """Dotted names, from the model directory, that a module at `relative` may import.

    `from . import x` and `from .x import y` may mean modules or names in them: both are listed,
    and the caller takes those that exist. What climbs out of the directory is not listed.

    >>> sorted(relative_imports(ast.parse("from .helper_y import z"), "modeling_x.py"))
    ['helper_y', 'helper_y.z']
    """
    package = Path(relative).parent.parts
    found: set[str] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or not 0 < node.level <= len(package) + 1:
            continue
        base = [*package[: len(package) + 1 - node.level], *(node.module or "").split(".")]
        base = [part for part in base if part]
        if base:
            found.add(".".join(base))
        found |= {".".join([*base, alias.name]) for alias in node.names if alias.name != "*"}
    return found
