"""Fields of the package's dataclasses: their defaults, and what their reprs and comparisons leave out."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import amp_rewrite

Field = dataclasses.Field[Any]

NUMBERS = {
    "decide.hazards.fill_reach._Held.pure": True,
    "decide.placement.cut_problem.CutProblem.islands": True,
    "decide.placement.labelling.Conversion.casts": 1,
    "decide.placement.place.PlacementRule.islands": True,
    "deploy.session.cache.Cache.limit": 20 << 30,
    "evidence.metric.Measure.higher": True,
    "fleet.batch.BatchSettings.write": True,
    "fleet.job.Job.threads": 1,
    "fleet.job.Job.write": True,
    "ir.patterns.match.MadeOf.most": 8,
    "ir.patterns.match.Ops.casts": True,
    "ir.patterns.match.Through.most": 8,
    "reports.rows.PortRow.after": -1,
    "reports.rows.ReportData.schema": 1,
    "reports.rows.Row.because_row": -1,
    "reports.rows.Row.named": True,
    "reports.rows.CastRow.after": -1,
    "reports.rows.ShiftRow.values": 1,
    "rewrite.attention.layout.OperandSource.groups": 1,
    "rewrite.attention.layout._Move.groups": 1,
    "rewrite.autodiff.vjp.rule.GradientRule.outputs": 1,
    "rewrite.shift.laws.OpPort.slot": -1,
    "runtime.ports.Port.required": True,
    "runtime.roofline.Roof.bfloat16": True,
    "runtime.runner.SessionOptions.optimized": True,
    "runtime.runner.SessionOptions.planned": True,
    "runtime.runner.SessionOptions.pooled": True,
    "runtime.runner.SessionOptions.spinning": True,
    "settings.option.Option.keyword": True,
    "settings.option.Option.setting": True,
    "train.keras.accuracy.Accuracy.axis": 1,
    "train.objective.prediction.Prediction.logits": True,
    "train.parallel.replicas.SingleReplica.world": 1,
    "train.step.rows.Rows.batch_size": 32,
    "train.update.graph.ForwardPass.micro_batches": 1,
    "train.update.optimizers.descent.RMSprop.rate_in_momentum": True,
    "train.update.optimizers.descent.SGD.rate_in_momentum": True,
    "train.update.optimizers.optimizer.Optimizer.decay_biases_and_norms": True,
}
"""Defaults that are numbers or switches, but for 0 and False."""
HIDDEN = {
    "decide.placement.cost_model.CostModel.sizes",
    "decide.placement.cost_model.CostModel.times",
    "files.model.Model.held",
    "files.tensors.Source.held",
    "ir.build.Index.names",
    "ir.patterns.clusters.Cluster.values",
    "reports.located_errors.LocatedErrors.errors",
    "rewrite.device_arithmetic.low_op.LowOp.values",
    "runtime.buffers.DoubleBuffer.sides",
    "runtime.kernels.Kernels.aliases",
    "runtime.kernels.Kernels.contrib",
    "runtime.kernels.Kernels.registrations",
    "runtime.runner.Runner.inner",
    "settings.op_lists.OpLists.entries",
    "train.step.model_loss.ModelLoss.results",
}
"""Public fields that a repr leaves out: tables, weights and sessions."""
NOT_COMPARED = {
    "files.tensors.Source.held",
    "ir.patterns.clusters.Cluster.values",
    "ir.view.View._known",
    "ir.view.View._memory",
    "reports.delta.Delta.alike",
    "reports.delta.Delta.ops",
    "reports.delta.Delta.sides",
    "reports.delta.Delta.unrelated",
    "train.step.fitting.History.epochs",
}
COMPUTED = {
    "files.model.Model.held",
    "ir.view.View._known",
    "reports.page.facts.RowFacts._model",
    "rewrite.attention.recognize.AttentionForm.keys",
    "rewrite.attention.recognize.AttentionForm.queries",
    "settings.op_lists.OpLists.fingerprint",
}
"""Fields that no argument sets."""


@cache
def classes() -> dict[str, type]:
    """All classes, but for those of other tools' integrations, by module and name."""

    def members() -> Iterator[type]:
        for found in pkgutil.walk_packages(amp_rewrite.__path__, "amp_rewrite."):
            if "integrations" not in found.name and not found.name.endswith("__main__"):
                module = importlib.import_module(found.name)
                yield from (c for _, c in inspect.getmembers(module, inspect.isclass) if c.__module__ == found.name)

    return {f"{owner.__module__.removeprefix('amp_rewrite.')}.{owner.__qualname__}": owner for owner in members()}


def fields() -> dict[str, Field]:
    """The fields of all dataclasses, by class and name."""
    return {
        f"{name}.{field.name}": field
        for name, owner in classes().items()
        if dataclasses.is_dataclass(owner)
        for field in dataclasses.fields(owner)
        if field.name in inspect.get_annotations(owner)
    }


def those(of: Callable[[Field], object]) -> set[str]:
    return {name for name, field in fields().items() if of(field)}


def test_numbers_and_switches_default_to_nothing_or_to_what_is_documented() -> None:
    tuples = {name: getattr(owner, "_field_defaults", {}) for name, owner in classes().items()}
    defaults: dict[str, object] = {name: field.default for name, field in fields().items()}
    defaults |= {f"{name}.{key}": default for name, given in tuples.items() for key, default in given.items()}
    assert {name: value for name, value in defaults.items() if isinstance(value, int) and value} == NUMBERS


def test_a_repr_leaves_out_tables_and_private_fields() -> None:
    assert those(lambda field: field.repr and field.name.startswith("_")) == set()
    assert those(lambda field: not field.repr and not field.name.startswith("_")) == HIDDEN


def test_memories_and_side_notes_are_not_compared() -> None:
    assert those(lambda field: not field.compare) == NOT_COMPARED


def test_every_field_is_an_argument_but_for_those_that_are_computed() -> None:
    assert those(lambda field: not field.init) == COMPUTED
