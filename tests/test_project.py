"""House rules that a reader of one file cannot see: each scans the whole source.

They read the syntax tree, not the text, so words in docstrings do not count.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

import milepost

ROOT = Path(__file__).parents[1]
LIBRARY = ROOT / "src" / "milepost"
TRAINER = ROOT / "src" / "milepost_trainer"
CODE_DIRECTORIES = ("src", "tests", "benchmarks", "examples")
TEXT_SUFFIXES = {".py", ".md", ".toml", ".yml", ".yaml", ".txt", ".cfg", ".sh"}
TEXT_NAMES = {"Makefile", "run", ".gitignore", "py.typed"}
NOT_OURS = {"golden", "__pycache__", "site", "build", "dist"}

MAX_LINES = 400

# Where everything may be caught, and why. Elsewhere the narrowest class is caught. A handler that
# ends with a bare `raise` only tidies up and needs no line here.
MAY_CATCH_EVERYTHING = {
    # tokenizers, processors and remote code raise what they like; the text becomes a note
    "hf/foreign_calls.py:attempt",
    # whatever went wrong, live memory is half filled: it becomes LoadTornError
    "checkpointing/load.py:_fill",
    # a user's callback raises what it likes; telling about a save must not fail it
    "checkpointing/events.py:Events.tell",
    # the Hub's client raises classes of several libraries; what is no answer of it is raised on
    "tools/publish_upload.py:Hub._retried",
    # what fails behind training belongs to whoever waits for it, or saves next
    "checkpointing/in_flight.py:SaveThread._outcome_of",
    "checkpointing/frozen_parts.py:FrozenParts._hash_late",
    "engine/snapshot.py:Snapshot._copy_later",
    # where one rank's failure becomes everybody's
    "engine/exchange.py:_Exchange._finish",
    "engine/read_shared.py:_Sharing._read",
    "engine/rendezvous.py:together",
    "engine/rendezvous.py:led",
    "manager/trio_load.py:_apply",
    # a model's own code computes its buffers on a twin of it, and may want what a twin has not
    "state/rebuild.py:_run",
    # a child of the crash harness tells its parent whatever it met
    "testing/forked.py:outcome_of",
    "testing/ranks.py:_be_a_rank",
    # a save policy raises what it likes, in a thread; all ranks raise it where they ask next
    "manager/agreement.py:StepAgreement._asked",
    # so does a retention policy; the error names it
    "manager/retention.py:union",
    # a thread that fails must not leave others waiting for it
    "manager/agreement.py:StepAgreement._start.run",
    "manager/mirror.py:Mirroring._copy",
    "engine/connections.py:clone_store.connect",
    # a scheduler raises what it likes; the others get their states back, and the error names it
    "manager/schedules.py:restore_all",
    # the end of a command: a fault of ours is one line too, with an exit code of its own
    "cli/answer.py:give",
    "cli/llm_migrate.py:convert",
}

# The layers that may change a file system (`hf` only through tempfile, which the scan lets pass).
# A signal that came is passed on to whoever listened before: to a pipe or socket of theirs.
MAY_WRITE_FILES = ("storage/", "testing/", "manager/signals.py")

# `.pt` files are archives of torch, so torch writes them: to a stream of ours, not to a path.
MAY_TORCH_SAVE = {
    "layouts/archive_write.py",
    "integrations/lightning_state.py",  # in memory, for the loader of Lightning to read
}

OS_WRITES = {
    *("chmod", "copy_file_range", "ftruncate", "link", "makedirs", "mkdir", "mkfifo"),
    *("posix_fallocate", "pwrite", "pwritev", "remove", "removedirs", "rename", "renames"),
    *("replace", "rmdir", "sendfile", "symlink", "truncate", "unlink", "utime"),
    *("write", "writev"),
}
OS_WRITE_FLAGS = {"O_APPEND", "O_CREAT", "O_RDWR", "O_TMPFILE", "O_TRUNC", "O_WRONLY"}
PATH_WRITES = {
    *("hardlink_to", "mkdir", "rmdir", "symlink_to", "touch", "unlink", "write_bytes"),
    *("write_text", "tofile"),
}
WRITING_MODES = frozenset("wax+")
CODE_RUNNING_MODULES = {
    *("_pickle", "cloudpickle", "code", "dill", "joblib", "marshal", "pickle", "runpy", "shelve"),
}
CODE_RUNNING_CALLS = {"__import__", "compile", "eval", "exec"}
UNPICKLING_CALLS = {"torch.load", "torch.save"}


# ---- rules


def test_importing_milepost_does_not_import_torch() -> None:
    script = "import sys, milepost; print(milepost.__file__ is None, 'torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "False False\n"


def test_text_files_have_no_trailing_spaces_and_python_files_no_tabs() -> None:
    found = []
    for path in _text_files():
        for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
            if line != line.rstrip():
                found.append(f"{path.relative_to(ROOT)}:{number}: trailing space")
            if path.suffix == ".py" and "\t" in line:
                found.append(f"{path.relative_to(ROOT)}:{number}: tab")
    assert found == []


@pytest.mark.parametrize("package", [LIBRARY, TRAINER], ids=lambda path: str(path.name))
def test_a_file_has_at_most_400_lines(package: Path) -> None:
    files = sorted(package.rglob("*.py"))
    lengths = {path.name: len(path.read_text().splitlines()) for path in files}
    assert {name: n for name, n in lengths.items() if n > MAX_LINES} == {}


def test_everything_is_caught_only_where_the_list_allows() -> None:
    found = {place for path in _library() for place in _broad_handlers(path)}
    assert found == MAY_CATCH_EVERYTHING


def test_environment_variables_are_read_by_one_module() -> None:
    # the crash harness sets those of the ranks that it forks
    assert _violations(_reads_environment, except_in=("_env.py", "testing/ranks.py")) == []


def test_files_are_changed_by_the_storage_layer_alone() -> None:
    assert _violations(_changes_files, except_in=MAY_WRITE_FILES) == []


def test_the_library_neither_pickles_nor_runs_strings() -> None:
    # the crash harness hears from its own forked children through a pipe
    assert _violations(_runs_code, except_in=("testing/forked.py", "testing/ranks.py")) == []


def test_torch_pickles_only_in_the_writer_of_archives() -> None:
    assert _violations(_pickles_by_torch, except_in=tuple(MAY_TORCH_SAVE)) == []


def test_the_trainer_leaves_all_that_to_the_library() -> None:
    rules = (_reads_environment, _changes_files, _runs_code, _pickles_by_torch)
    found = [
        f"{path.relative_to(TRAINER)}:{getattr(node, 'lineno', 0)}: {ast.unparse(node)[:80]}"
        for path in sorted(TRAINER.rglob("*.py"))
        for node in ast.walk(_tree(path))
        if any(rule(node) for rule in rules)
    ]
    assert found == []
    assert [place for path in TRAINER.rglob("*.py") for place in _broad_handlers(path)] == []


def test_the_trainer_uses_public_names_alone() -> None:
    used, imported = set(), set()
    for path in TRAINER.rglob("*.py"):
        for node in ast.walk(_tree(path)):
            imported |= {name for name in _imported(node) if name.startswith("milepost.")}
            if isinstance(node, ast.Attribute) and _dotted(node.value) == "mp":
                used.add(node.attr)
    assert imported == set()
    assert used and used <= set(milepost.__all__)


def test_our_own_code_is_never_mocked() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.Import | ast.ImportFrom) and _imports_a_mock(node)
    ]
    assert found == []


# ---- the rules find what they look for


@pytest.mark.parametrize(
    "code",
    [
        "os.replace(a, b)",
        "os.makedirs(a)",
        "from os import rename",
        "import shutil",
        "from shutil import rmtree",
        "path.write_text(text)",
        "path.mkdir()",
        "path.replace(target)",
        "path.rename(target)",
        "open(path, 'wb')",
        "open(path, mode='r+b')",
        "path.open('x')",
        "os.open(path, os.O_WRONLY | os.O_CREAT)",
        "os.open(path, flags)",
    ],
)
def test_a_change_of_a_file_is_seen(code: str) -> None:
    assert any(map(_changes_files, ast.walk(ast.parse(code))))


@pytest.mark.parametrize(
    "code",
    [
        "open(path)",
        "open(path, 'rb')",
        "path.open('rb')",
        "Checkpoint.open(path)",
        "archive.open('weights')",
        "os.open(path, os.O_RDONLY | os.O_CLOEXEC)",
        "text.replace('a', 'b')",
        "replace(plan, step=1)",
        "dataclasses.replace(plan, step=1)",
        "stream.write(data)",
        "fileops.unlink(path)",
    ],
)
def test_what_changes_no_file_is_let_pass(code: str) -> None:
    assert not any(map(_changes_files, ast.walk(ast.parse(code))))


@pytest.mark.parametrize(
    ("rule", "code"),
    [
        ("environment", "os.environ['HOME']"),
        ("environment", "os.getenv('HOME')"),
        ("environment", "from os import environ"),
        ("code", "import pickle"),
        ("code", "from pickle import loads"),
        ("code", "import joblib.numpy_pickle"),
        ("code", "eval(text)"),
        ("code", "numpy.load(path, allow_pickle=True)"),
        ("torch", "torch.load(path)"),
        ("torch", "from torch import save"),
    ],
)
def test_a_forbidden_use_is_seen(rule: str, code: str) -> None:
    rules = {"environment": _reads_environment, "code": _runs_code, "torch": _pickles_by_torch}
    assert any(map(rules[rule], ast.walk(ast.parse(code))))


# ---- files


def _library() -> Iterator[Path]:
    return iter(sorted(LIBRARY.rglob("*.py")))


def _text_files() -> Iterator[Path]:
    tops = [path for path in sorted(ROOT.iterdir()) if path.is_file()]
    directories = [ROOT / name for name in (*CODE_DIRECTORIES, "docs", "requirements", ".ci")]
    below = [path for top in directories for path in sorted(top.rglob("*")) if path.is_file()]
    for path in [*tops, *below]:
        parts = path.relative_to(ROOT).parts
        ours = NOT_OURS.isdisjoint(parts) and not any(p.endswith(".egg-info") for p in parts)
        if ours and (path.suffix in TEXT_SUFFIXES or path.name in TEXT_NAMES):
            yield path


def _name(path: Path) -> str:
    """Inside its package."""
    return path.relative_to(LIBRARY if path.is_relative_to(LIBRARY) else TRAINER).as_posix()


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def _violations(rule: Callable[[ast.AST], bool], *, except_in: tuple[str, ...]) -> list[str]:
    return [
        f"{_name(path)}:{getattr(node, 'lineno', 0)}: {ast.unparse(node)[:80]}"
        for path in _library()
        if not _name(path).startswith(except_in)
        for node in ast.walk(_tree(path))
        if rule(node)
    ]


# ---- rules over one node


def _dotted(node: ast.AST) -> str:
    """`a.b.c` for such an expression; empty for any other."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (home := _dotted(node.value)):
        return f"{home}.{node.attr}"
    return ""


def _imported(node: ast.AST) -> set[str]:
    """The dotted names that an import brings in, with the modules that hold them."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
        return {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return set()


def _reads_environment(node: ast.AST) -> bool:
    names = {f"os.{name}" for name in ("environ", "environb", "getenv", "getenvb", "putenv")}
    return _dotted(node) in names or not names.isdisjoint(_imported(node))


def _changes_files(node: ast.AST) -> bool:
    imported = _imported(node)
    if "shutil" in imported or any(f"os.{name}" in imported for name in OS_WRITES):
        return True
    if not isinstance(node, ast.Call):
        return False
    function = _dotted(node.func)
    if function == "os.open":
        return not _only_reads(node)
    if function.startswith("os."):
        return function.removeprefix("os.") in OS_WRITES
    if function.startswith("fileops."):
        return False
    if function == "open":
        return _opens_for_writing(node.args[1:2], node.keywords)
    return isinstance(node.func, ast.Attribute) and _changes_a_path(node.func.attr, node)


def _changes_a_path(method: str, call: ast.Call) -> bool:
    if method == "open":
        return _opens_for_writing(call.args[:1], call.keywords)
    if method in ("replace", "rename"):  # of a Path: one argument; of a str or dataclass: others
        return len(call.args) == 1 and not call.keywords
    return method in PATH_WRITES


def _opens_for_writing(mode_argument: list[ast.expr], keywords: list[ast.keyword]) -> bool:
    modes = [*mode_argument, *(keyword.value for keyword in keywords if keyword.arg == "mode")]
    return any(_is_writing_mode(mode) for mode in modes)


def _is_writing_mode(mode: ast.expr) -> bool:
    if not (isinstance(mode, ast.Constant) and isinstance(mode.value, str)):
        return False
    letters = set(mode.value)
    return letters <= set("rwaxbt+") and not letters.isdisjoint(WRITING_MODES)


def _only_reads(call: ast.Call) -> bool:
    """Whether the flags of an `os.open` are spelled out, and none of them writes."""
    if len(call.args) < 2:
        return False
    flags = {_dotted(node) for node in ast.walk(call.args[1]) if isinstance(node, ast.Attribute)}
    return "os.O_RDONLY" in flags and flags.isdisjoint({f"os.{name}" for name in OS_WRITE_FLAGS})


def _runs_code(node: ast.AST) -> bool:
    if any(name.partition(".")[0] in CODE_RUNNING_MODULES for name in _imported(node)):
        return True
    if not isinstance(node, ast.Call):
        return False
    allows_pickle = any(keyword.arg == "allow_pickle" for keyword in node.keywords)
    return allows_pickle or _dotted(node.func) in CODE_RUNNING_CALLS


def _pickles_by_torch(node: ast.AST) -> bool:
    called = _dotted(node.func) if isinstance(node, ast.Call) else ""
    return called in UNPICKLING_CALLS or not UNPICKLING_CALLS.isdisjoint(_imported(node))


def _imports_a_mock(node: ast.Import | ast.ImportFrom) -> bool:
    return any(
        name.startswith(("unittest.mock", "mock", "pytest_mock")) for name in _imported(node)
    )


def _broad_handlers(path: Path) -> Iterator[str]:
    """`file:function` of each handler that catches everything and does not pass it on."""
    return _broad_handlers_below(_tree(path), f"{_name(path)}:")


def _broad_handlers_below(node: ast.AST, prefix: str) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        inner = prefix
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{prefix}{child.name}."
        if isinstance(child, ast.ExceptHandler) and _is_broad(child):
            yield prefix.rstrip(".")
        yield from _broad_handlers_below(child, inner)


def _is_broad(handler: ast.ExceptHandler) -> bool:
    caught = handler.type
    classes = caught.elts if isinstance(caught, ast.Tuple) else [caught] if caught else []
    names = {_dotted(one) for one in classes}
    last = handler.body[-1]
    if isinstance(last, ast.Raise) and last.exc is None:
        return False
    return caught is None or not names.isdisjoint({"Exception", "BaseException"})
