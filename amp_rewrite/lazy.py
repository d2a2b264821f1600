"""Lazy public names (PEP 562), listed in a package's stub and imported on first use."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module


def lazy_exports(package: str) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` for a package with its public names in `__init__.pyi`.

    Each line of the stub is `from MODULE import NAME as NAME`. A module is imported on the first use of one of its
    names, so that reading two reports does not import onnx. AttributeError for a name missing from the stub.
    """
    exporter = sys.modules[package]
    get_data: Callable[[str], bytes] = exporter.__loader__.get_data  # type: ignore[union-attr]  # also inside a zip
    stub = get_data(f"{exporter.__path__[0]}{os.sep}__init__.pyi")
    modules = {words[3]: words[1] for words in map(str.split, stub.decode("utf-8").splitlines())}

    def getattr_(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = modules[name]
        # `from amp_rewrite import train` exports a module, not a name in one.
        value = import_module(f"{module}.{name}") if module == package else getattr(import_module(module), name)
        setattr(exporter, name, value)
        return value

    return getattr_, lambda: sorted(modules), sorted(modules)
