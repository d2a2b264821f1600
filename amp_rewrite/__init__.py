"""Automatic mixed precision for ONNX: `convert` a float32 model, read in the `Report` why each op is what it is."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from amp_rewrite.convert import Converted, convert
    from amp_rewrite.dtypes import DType
    from amp_rewrite.emulate import emulate
    from amp_rewrite.errors import (
        AmpRewriteError,
        ConfigError,
        ConversionError,
        ListError,
        ModelError,
        PatternError,
        PolicyError,
        ReportError,
    )
    from amp_rewrite.files.model import Model
    from amp_rewrite.lists import Level, OpLists, load_lists
    from amp_rewrite.painting.color import Coloring, Paint
    from amp_rewrite.painting.painter import paint
    from amp_rewrite.plan import Plan
    from amp_rewrite.plan import plan_casts as plan
    from amp_rewrite.policy import Safety, Target
    from amp_rewrite.reports.diff import Delta, diff
    from amp_rewrite.reports.inventory import report_of
    from amp_rewrite.reports.report import Report
    from amp_rewrite.rewrite import apply
    from amp_rewrite.version import VERSION as __version__
    from amp_rewrite.view import View

__all__ = [
    "AmpRewriteError",
    "Coloring",
    "ConfigError",
    "ConversionError",
    "Converted",
    "DType",
    "Delta",
    "Level",
    "ListError",
    "Model",
    "ModelError",
    "OpLists",
    "Paint",
    "PatternError",
    "Plan",
    "PolicyError",
    "Report",
    "ReportError",
    "Safety",
    "Target",
    "View",
    "__version__",
    "apply",
    "convert",
    "diff",
    "emulate",
    "load_lists",
    "paint",
    "plan",
    "report_of",
]

# Names are imported when they are first used: reading two reports should not cost an import of onnx.
_HOMES = {
    "convert": ("Converted", "convert"),
    "dtypes": ("DType",),
    "emulate": ("emulate",),
    "errors": tuple(name for name in __all__ if name.endswith("Error")),
    "files.model": ("Model",),
    "lists": ("Level", "OpLists", "load_lists"),
    "painting.color": ("Coloring", "Paint"),
    "painting.painter": ("paint",),
    "plan": ("Plan", "plan"),
    "policy": ("Safety", "Target"),
    "reports.diff": ("Delta", "diff"),
    "reports.inventory": ("report_of",),
    "reports.report": ("Report",),
    "rewrite": ("apply",),
    "version": ("__version__",),
    "view": ("View",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}
_INSIDE = {"plan": "plan_casts", "__version__": "VERSION"}


class _Package(ModuleType):
    """Finds public names when they are first asked for, and keeps them from the submodules of the same name."""

    def __getattr__(self, name: str) -> object:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = getattr(import_module(f"{__name__}.{_HOME[name]}"), _INSIDE.get(name, name))
        super().__setattr__(name, found)
        return found

    def __setattr__(self, name: str, value: object) -> None:
        # Importing amp_rewrite.convert makes Python bind the submodule here, over the function.
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return __all__


sys.modules[__name__].__class__ = _Package
