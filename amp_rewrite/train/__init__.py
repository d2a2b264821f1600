"""Training: gradients as a graph transform, loss scale, optimizers, and the whole step as one graph.

The names that TensorFlow has for mixed precision are here under the same names.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from amp_rewrite.policy import Policy
    from amp_rewrite.serving.process import global_policy, policy_scope, set_policy
    from amp_rewrite.train.binding import bind
    from amp_rewrite.train.compat import (
        LossScaleOptimizer,
        disable_mixed_precision_graph_rewrite,
        enable_mixed_precision_graph_rewrite,
    )
    from amp_rewrite.train.foreign import ScaledGradients, scale_gradients
    from amp_rewrite.train.loss_scale import DynamicLossScale, FixedLossScale, IndexedSlices, LossScale
    from amp_rewrite.train.model_loss import ModelLoss
    from amp_rewrite.train.optimizers import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop
    from amp_rewrite.train.parallel import (
        DataParallelTrainer,
        Replicas,
        averaged,
        check_strategy,
        join_replicas,
        shard,
    )
    from amp_rewrite.train.stateful import StatefulOptimizer, Variable
    from amp_rewrite.train.step import TrainingStep, training_step
    from amp_rewrite.train.step_file import load_step, save_step
    from amp_rewrite.train.trainer import History, Scores, Trainer

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "DataParallelTrainer",
    "DynamicLossScale",
    "FixedLossScale",
    "History",
    "IndexedSlices",
    "LossScale",
    "LossScaleOptimizer",
    "ModelLoss",
    "Optimizer",
    "Policy",
    "RMSprop",
    "Replicas",
    "ScaledGradients",
    "Scores",
    "StatefulOptimizer",
    "Trainer",
    "TrainingStep",
    "Variable",
    "averaged",
    "bind",
    "check_strategy",
    "disable_mixed_precision_graph_rewrite",
    "enable_mixed_precision_graph_rewrite",
    "global_policy",
    "join_replicas",
    "load_step",
    "policy_scope",
    "save_step",
    "scale_gradients",
    "set_policy",
    "shard",
    "training_step",
]

# Imported when first used, so that one part does not cost the import of all.
_HOMES = {
    "policy": ("Policy",),
    "serving.process": ("global_policy", "policy_scope", "set_policy"),
    "train.binding": ("bind",),
    "train.compat": (
        "LossScaleOptimizer",
        "disable_mixed_precision_graph_rewrite",
        "enable_mixed_precision_graph_rewrite",
    ),
    "train.foreign": ("ScaledGradients", "scale_gradients"),
    "train.loss_scale": ("DynamicLossScale", "FixedLossScale", "IndexedSlices", "LossScale"),
    "train.model_loss": ("ModelLoss",),
    "train.optimizers": ("SGD", "Adagrad", "Adam", "AdamW", "Optimizer", "RMSprop"),
    "train.parallel": (
        "DataParallelTrainer",
        "Replicas",
        "averaged",
        "check_strategy",
        "join_replicas",
        "shard",
    ),
    "train.stateful": ("StatefulOptimizer", "Variable"),
    "train.step": ("TrainingStep", "training_step"),
    "train.step_file": ("load_step", "save_step"),
    "train.trainer": ("History", "Scores", "Trainer"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"amp_rewrite.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
