"""Automatic mixed precision for ONNX: `convert` a float32 model, read in the `Report` why each op is what it is."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from amp_rewrite import train
    from amp_rewrite.benchmark.bench import bench
    from amp_rewrite.benchmark.result import Benchmark
    from amp_rewrite.cli.terminal import progress_bar
    from amp_rewrite.convert import Converted, convert
    from amp_rewrite.doctor.checkup import Checkup, doctor
    from amp_rewrite.dtypes import DType
    from amp_rewrite.emulate import emulate
    from amp_rewrite.errors import (
        AmpRewriteError,
        ConfigError,
        ConversionError,
        EvidenceError,
        FeedError,
        GradientError,
        ListError,
        MachineError,
        ModelError,
        PatternError,
        PolicyError,
        ReportError,
        TrainingError,
    )
    from amp_rewrite.evidence.calibrate import calibrate
    from amp_rewrite.evidence.feed import Feed
    from amp_rewrite.evidence.locate import Located, locate
    from amp_rewrite.evidence.ranges import Ranges
    from amp_rewrite.evidence.verdict import Verdict
    from amp_rewrite.evidence.verify import verify
    from amp_rewrite.evidence.weights import check_weights
    from amp_rewrite.files.model import Model
    from amp_rewrite.lists import Level, OpLists, load_lists
    from amp_rewrite.painting.color import Coloring, Paint
    from amp_rewrite.painting.painter import paint
    from amp_rewrite.plan import Plan
    from amp_rewrite.plan import plan_casts as plan
    from amp_rewrite.policy import Placement, Policy, Safety, Target
    from amp_rewrite.repair import Repaired, repair
    from amp_rewrite.reports.diff import Delta, diff
    from amp_rewrite.reports.inventory import report_of
    from amp_rewrite.reports.report import Report
    from amp_rewrite.rewrite import apply
    from amp_rewrite.serving.cache import Cache
    from amp_rewrite.serving.process import global_policy, policy_scope, set_policy
    from amp_rewrite.serving.session import Session
    from amp_rewrite.train.compat import disable_mixed_precision_graph_rewrite, enable_mixed_precision_graph_rewrite
    from amp_rewrite.train.foreign import scale_gradients
    from amp_rewrite.train.gradients import gradients
    from amp_rewrite.train.step import TrainingStep, training_step
    from amp_rewrite.train.trainer import Trainer
    from amp_rewrite.version import VERSION as __version__
    from amp_rewrite.view import View

__all__ = [
    "AmpRewriteError",
    "Benchmark",
    "Cache",
    "Checkup",
    "Coloring",
    "ConfigError",
    "ConversionError",
    "Converted",
    "DType",
    "Delta",
    "EvidenceError",
    "Feed",
    "FeedError",
    "GradientError",
    "Level",
    "ListError",
    "Located",
    "MachineError",
    "Model",
    "ModelError",
    "OpLists",
    "Paint",
    "PatternError",
    "Placement",
    "Plan",
    "Policy",
    "PolicyError",
    "Ranges",
    "Repaired",
    "Report",
    "ReportError",
    "Safety",
    "Session",
    "Target",
    "Trainer",
    "TrainingError",
    "TrainingStep",
    "Verdict",
    "View",
    "__version__",
    "apply",
    "bench",
    "calibrate",
    "check_weights",
    "convert",
    "diff",
    "disable_mixed_precision_graph_rewrite",
    "doctor",
    "emulate",
    "enable_mixed_precision_graph_rewrite",
    "global_policy",
    "gradients",
    "load_lists",
    "locate",
    "paint",
    "plan",
    "policy_scope",
    "progress_bar",
    "repair",
    "report_of",
    "scale_gradients",
    "set_policy",
    "train",
    "training_step",
    "verify",
]

# Names are imported when they are first used: reading two reports should not cost an import of onnx.
_HOMES = {
    "benchmark.bench": ("bench",),
    "benchmark.result": ("Benchmark",),
    "cli.terminal": ("progress_bar",),
    "serving.cache": ("Cache",),
    "convert": ("Converted", "convert"),
    "doctor.checkup": ("Checkup", "doctor"),
    "dtypes": ("DType",),
    "emulate": ("emulate",),
    "errors": tuple(name for name in __all__ if name.endswith("Error")),
    "evidence.calibrate": ("calibrate",),
    "evidence.feed": ("Feed",),
    "evidence.locate": ("Located", "locate"),
    "evidence.ranges": ("Ranges",),
    "evidence.verdict": ("Verdict",),
    "evidence.verify": ("verify",),
    "evidence.weights": ("check_weights",),
    "files.model": ("Model",),
    "lists": ("Level", "OpLists", "load_lists"),
    "painting.color": ("Coloring", "Paint"),
    "painting.painter": ("paint",),
    "plan": ("Plan", "plan"),
    "policy": ("Placement", "Policy", "Safety", "Target"),
    "repair": ("Repaired", "repair"),
    "reports.diff": ("Delta", "diff"),
    "reports.inventory": ("report_of",),
    "reports.report": ("Report",),
    "rewrite": ("apply",),
    "serving.process": ("global_policy", "policy_scope", "set_policy"),
    "serving.session": ("Session",),
    "train.compat": ("disable_mixed_precision_graph_rewrite", "enable_mixed_precision_graph_rewrite"),
    "train.foreign": ("scale_gradients",),
    "train.gradients": ("gradients",),
    "train.step": ("TrainingStep", "training_step"),
    "train.trainer": ("Trainer",),
    "version": ("__version__",),
    "view": ("View",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}
_INSIDE = {"plan": "plan_casts", "__version__": "VERSION"}


class _Package(ModuleType):
    """Finds public names when they are first asked for, and keeps them from the submodules of the same name."""

    def __getattr__(self, name: str) -> object:
        if name == "train":  # a public name that is a package itself
            return import_module(f"{__name__}.train")
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
