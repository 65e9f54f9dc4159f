"""After-training verbs, a module each: every module in here with a `register` brings its verbs."""

from __future__ import annotations

import importlib
import pkgutil

import typer


def register(app: typer.Typer) -> None:
    """Add the verbs of all modules in this package, by module name."""
    for found in sorted(pkgutil.iter_modules(__path__), key=lambda module: module.name):
        importlib.import_module(f"{__name__}.{found.name}").register(app)
