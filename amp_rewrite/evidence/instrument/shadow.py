"""Local error of each low op, and accumulated error of each value, measured inside the runtime.

One model holds the float32 reference and, beside it, the measured part: *shadows* of single ops, which read the
reference's values, or the whole candidate. It is an ordinary mixed model, and `emulate` makes it round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from amp_rewrite.dtypes import LOW_TYPES, DType
from amp_rewrite.errors import ModelError
from amp_rewrite.evidence.conditions import Conditions
from amp_rewrite.evidence.data.feed import Batch, Feed
from amp_rewrite.evidence.instrument.error_nodes import ErrorStats, read
from amp_rewrite.evidence.instrument.lazy_weights import casting_in_graph
from amp_rewrite.evidence.instrument.pairing import Pairing
from amp_rewrite.evidence.instrument.side_by_side import MeasuredModel, reads, with_candidate, with_shadows, with_shapes
from amp_rewrite.files.model import Model
from amp_rewrite.ir.exact_ops import exact
from amp_rewrite.ir.op_classes import RANDOM
from amp_rewrite.ir.versions import FIRST_WHERE
from amp_rewrite.ir.view import MAIN, Op, OpId, Role, ValueId, View
from amp_rewrite.reports.render import count
from amp_rewrite.rewrite.emulate import emulate
from amp_rewrite.rewrite.opset import moved_to
from amp_rewrite.rewrite.passes.inline import inlined
from amp_rewrite.runtime.runner import Given, Runner, SessionOptions

CHUNK = 256
"""Values measured in one session. More of them make larger graphs; fewer repeat the reference more often."""


def local_errors(
    reference: Model, low: Model, feed: Feed, *, progress: Callable[[int, int], None] | None = None
) -> dict[str, float]:
    """Return the local error of each low op of `low`, by the op's name in `reference`, in topological order.

    `reference`: a float32 model (of a half model its widened twin); `low`: a conversion of it. For a conversion by this
    package these are `converted.view.model` and `converted.result`, and the names are those of `converted.view.ops`.
    Every op of the main graph that computes in a low type gets a *shadow*: it reads the reference's float32 values,
    rounded to the op's types in `low`, with the op's weights there, computes in float32 and rounds its result. The
    error is sqrt(sum (shadow - reference)^2 / sum reference^2) over all batches, the largest over all outputs; inf if a
    value is finite only in the reference. An op with bodies is measured as a whole; ops that move or select values
    (`amp_rewrite/ir/exact_ops.py`) have no local error and are left out.

    Only a few numbers per op leave the runtime. `progress(done, total)` counts runs. Raise ModelError if no value of
    the two models matches.
    """
    bench = Bench.of(reference, low)
    errors: dict[str, float] = {}
    for value, stats in bench.local_errors(feed, Conditions(chunk=CHUNK, progress=progress)).items():
        op = bench.reference.producer(bench.measured[value])
        name = op.name if op is not None else ""
        errors[name] = max(errors.get(name, 0.0), stats.error(bench.low.tiny))
    return errors


@dataclass(frozen=True)
class Bench(Pairing):
    """A reference and a candidate that fit into one graph."""

    @classmethod
    def of(cls, reference: Model, candidate: Model) -> Bench:
        """Pair two models, at the newer opset of theirs.

        ModelError if one cannot be moved there, for models without floats, or if no value matches.
        """
        views = [View.of(inlined(model)) for model in (reference, candidate)]
        newest = max(view.opset for view in views)
        a, b = (view if view.opset == newest else _moved(view, newest) for view in views)
        _check_opsets(a, b)
        bench = cls.between(a, b)
        if not bench.measurable:
            raise ModelError("the candidate's main graph computes no floating value; there is nothing to compare")
        if not bench.measured:
            raise ModelError("no value of the two models matches: their ops have neither names nor structure in common")
        return bench

    @cached_property
    def shadowed(self) -> tuple[ValueId, ...]:
        """Return the candidate's values that a shadow can compute: results of low ops whose inputs are available."""
        shadowed = (op for op in self.candidate.ops if op.id in self._available and self.rounds(op))
        return tuple(value for op in shadowed for value in op.results if value in self.measured)

    def rounds(self, op: Op) -> bool:
        """True if an op can lose digits: a low op that does more than move or select its inputs."""
        if not self.is_low(op.id) or op.op_type in RANDOM:
            return False
        view = self.candidate
        weights = (v for v in op.inputs if v is not None and v not in self.values)
        return bool(op.bodies) or not exact(op) or any((view.dtype(v) or DType.FLOAT).low for v in weights)

    def is_low(self, op: OpId) -> bool:
        """True if an op reads or writes a low type, or contains one in its bodies."""
        return op in self._low_ops

    @cached_property
    def _low_ops(self) -> frozenset[OpId]:
        view = self.candidate
        low: set[OpId] = set()
        for op in view.ops:
            within = (inner in low for body in op.bodies for inner in view.scopes[body].ops)
            if any(view.dtype(v) in LOW_TYPES for v in op.ports) or any(within):
                low.add(op.id)
        return frozenset(low)

    @cached_property
    def _available(self) -> frozenset[OpId]:
        """Return ops of the main graph that depend only on paired values and the candidate's constants."""
        view = self.candidate
        available: set[OpId] = set()
        for op in view.ops:
            if op.scope != MAIN:
                continue
            unpaired = [view.values[v] for v in reads(view, op) if v not in self.values]
            if all(v.role is Role.INITIALIZER if v.producer is None else v.producer in available for v in unpaired):
                available.add(op.id)
        return frozenset(available)

    def of_one_shape(self, feed: Feed) -> Bench:
        """Return the bench without pairs whose shapes differ on the first batch. Raise ModelError if none is left."""
        values = tuple(self.measured)
        shapes = _run(_opened(_rounding(with_shapes(self, values))), next(iter(feed)))
        mine, theirs = (list(shapes.values())[i::2] for i in (0, 1))
        other = {
            self.measured[value]
            for value, x, y in zip(values, mine, theirs, strict=True)
            if not np.array_equal(x, y)  # type: ignore[arg-type]
        }
        bench = replace(self, values={v: w for v, w in self.values.items() if w not in other})
        if not bench.measured:
            raise ModelError(
                f"{count(len(values), 'value')} of the two models match by name, and none of them by shape"
            )
        return bench

    def local_errors(self, feed: Feed, conditions: Conditions) -> dict[ValueId, ErrorStats]:
        """Return the local error of each value in `shadowed`: its shadow against the reference."""
        return self._measured(self.shadowed, with_shadows, feed, conditions)

    def accumulated_errors(self, feed: Feed, conditions: Conditions) -> dict[ValueId, ErrorStats]:
        """Return the accumulated error of each paired value: the candidate as it runs against the reference."""
        return self._measured(tuple(self.measured), with_candidate, feed, conditions)

    def _measured(
        self,
        values: Sequence[ValueId],
        build: Callable[[Pairing, Sequence[ValueId]], MeasuredModel],
        feed: Feed,
        conditions: Conditions,
    ) -> dict[ValueId, ErrorStats]:
        size = conditions.chunk or CHUNK
        starts = range(0, len(values), size)
        per_session = len(feed) if conditions.progress else 0
        stats = dict.fromkeys(values, ErrorStats())
        for number, start in enumerate(starts):
            part = values[start : start + size]
            measuring = build(self, part)
            runner = _opened(measuring.on(_rounding(measuring.model)))
            for done, batch in enumerate(feed, 1):
                packed = _run(runner, batch)
                for value, more in zip(part, read(*packed.values()), strict=True):  # type: ignore[arg-type]
                    stats[value] = stats[value].merge(more)
                conditions.tell(number * per_session + done, len(starts) * per_session)
        return stats


def _rounding(model: Model) -> Model:
    return casting_in_graph(emulate(casting_in_graph(model), io="float32"))


def _opened(model: Model) -> Runner:
    """Open a model without graph optimizations, because fusion depends on the rest of the graph."""
    return Runner.open(model, SessionOptions(optimized=False, planned=False, spinning=False))


def _run(runner: Runner, batch: Batch) -> dict[str, Given]:
    """Run on the arrays of a batch that the model reads."""
    inputs = {port.name for port in runner.inputs}
    return runner.run({name: array for name, array in batch.items() if name in inputs})


def _moved(view: View, opset: int) -> View:
    move = moved_to(view, opset) if "" in view.opsets else ""
    if isinstance(move, str):
        why = f": {move}" if move else ""
        raise ModelError(
            f"the models import ai.onnx opsets {view.opset} and {opset}, and values are compared in one graph; bring"
            f" both to one with onnx.version_converter{why}"
        )
    return View.of(move.model)


def _check_opsets(a: View, b: View) -> None:
    for domain in a.opsets.keys() & b.opsets.keys():
        if a.opsets[domain] != b.opsets[domain]:
            raise ModelError(
                f"the two models import {domain or 'ai.onnx'} opsets {a.opsets[domain]} and {b.opsets[domain]}, and"
                " values are compared in one graph; bring both to one with onnx.version_converter"
            )
    if a.opsets.get("", FIRST_WHERE) < FIRST_WHERE:
        raise ModelError(
            f"the models import ai.onnx opset {a.opsets['']}, and values are compared from {FIRST_WHERE} on; raise it"
            " with onnx.version_converter"
        )
