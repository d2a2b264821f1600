"""The adjoint model: forward pass, backward pass, and the product of both at each site, reduced to a few numbers.

The loss is L = r·y with seeds r that are inputs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto

from amp_rewrite.dtypes import DType
from amp_rewrite.evidence.data.feed import Batch
from amp_rewrite.evidence.prediction.copies import with_copies
from amp_rewrite.evidence.prediction.sites import RoundingSites
from amp_rewrite.files.model import Model
from amp_rewrite.files.protos import clone, refill
from amp_rewrite.ir.builder import declared, new_node
from amp_rewrite.ir.names import numbered
from amp_rewrite.ir.op_classes import ELEMENTLESS
from amp_rewrite.ir.schema import TENSOR
from amp_rewrite.ir.versions import FIRST_SCATTER_ADD
from amp_rewrite.ir.view import MAIN, ValueId, View
from amp_rewrite.rewrite.autodiff.builder import Builder
from amp_rewrite.rewrite.autodiff.gradients import Blocked, backward, differentiable
from amp_rewrite.rewrite.autodiff.vjp.paths import STOP, captures, floating
from amp_rewrite.rewrite.opset import moved_to
from amp_rewrite.runtime.runner import Runner, SessionOptions

WIDTH = 5
"""Numbers of a site, see `Measured`."""


@dataclass(frozen=True)
class Measured:
    """Numbers of each site, by one seed.

    `square`: sum (g·δ)², where δ is the rounding error and g = ∂L/∂v. `bound`: sum |g·δ|. `signed`: sum g·δ. `lost`:
    a finite value becomes infinite, and g is not 0 there. `wild`: a gradient is not finite where δ is not 0.
    `unclear`: sites that must be measured with care, since their sums are not finite.
    """

    square: NDArray[np.float64]
    bound: NDArray[np.float64]
    signed: NDArray[np.float64]
    lost: NDArray[np.bool_]
    wild: NDArray[np.bool_]
    unclear: frozenset[int]


@dataclass(frozen=True)
class Adjoint:
    """The model of `sites`, open for inputs of one shape.

    `seeds`: the names of the seed of each output. `dark`: sites without a usable gradient, with the reason; their
    numbers are meaningless. `blocked`: ops that no gradient passes, by name. `careful`: sites where infinities are told
    from errors, which takes five times the passes over a value.
    """

    runner: Runner
    seeds: Mapping[str, str]
    sites: int
    dark: Mapping[int, str]
    blocked: Mapping[str, str]
    careful: frozenset[int] = frozenset()

    def run(self, batch: Batch, seeds: Mapping[str, NDArray[np.float32]]) -> Measured:
        """Return the numbers of each site for a batch and a seed of each output."""
        inputs = {port.name for port in self.runner.inputs}
        fed = {**{self.seeds[name]: seed for name, seed in seeds.items()}, **batch}
        (packed,) = self.runner.run({name: array for name, array in fed.items() if name in inputs}).values()
        table = np.asarray(packed, np.float64).reshape(-1, WIDTH)
        square, bound, signed, lost, wild = table.T
        unclear = frozenset(np.flatnonzero(~np.isfinite(table).all(axis=1)).tolist()) - self.careful
        return Measured(square, bound, signed, lost > 0, wild > 0, unclear)


def adjoint(
    sites: RoundingSites, to: DType, outputs: Mapping[str, tuple[int, ...]], batch: Batch,
    *, saturate: Collection[ValueId] = (), careful: frozenset[int] = frozenset(),
) -> Adjoint:  # fmt: skip
    """Return the adjoint model of the float32 view of sites for inputs of the shapes of a batch.

    `outputs`: the shape of each floating output that counts. `saturate`: values that are clamped before they are
    rounded. `careful`: sites that are measured with care. GradientError before opset 12. O(nodes + uses).
    """
    view = sites.view
    taken = set(view.names)
    copied = with_copies(view, sites.all, to, saturate, taken)
    names = copied.names
    seeded, loss, seeds = _with_loss(copied.model, view, outputs, batch, taken)
    wrt = tuple(dict.fromkeys(names))
    ready = differentiable(_scattering(seeded), loss, wrt, partly=True)
    blocked: Blocked = {}
    b = Builder.of(ready)
    before = len(b.nodes)
    gradients = backward(b, {loss: b.scalar(1.0, DType.FLOAT)}, wrt, blocked=blocked)
    dark = _dark(b.facts.view, wrt, loss, blocked)
    flows = {name for node in b.nodes[before:] for name in node.output}
    measure = _Measuring(b)
    for i, (name, pair) in enumerate(zip(names, copied.pairs, strict=True)):
        measured = name not in dark and gradients[name] in flows
        measure.add(*pair, gradients[name] if measured else None, careful=i in careful)
    b.nodes.extend(measure.packed())
    refill(b.graph, "output", [declared(measure.result, DType.FLOAT, None)])
    runner = Runner.open(b.model(), SessionOptions(optimized=False, planned=False, spinning=False))
    reasons = {i: dark[name] for i, name in enumerate(names) if name in dark}
    return Adjoint(runner, seeds, len(sites.all), reasons, blocked, careful)


def _with_loss(
    model: Model, view: View, outputs: Mapping[str, tuple[int, ...]], batch: Batch, taken: set[str]
) -> tuple[Model, str, dict[str, str]]:
    """Return the model with inputs of fixed shapes and with the sum of seed · output, its name, and the seeds."""
    proto = clone(model.proto)
    graph = proto.graph
    fixed = []
    for value in view.scopes[MAIN].inputs:
        name, type_ = view.value_name(value), view.types[value]
        array = batch.get(name)
        if (
            type_ is not None
            and type_.container == TENSOR
            and type_.dtype is not None
            and isinstance(array, np.ndarray)
        ):
            fixed.append(declared(name, type_.dtype, array.shape))
        else:
            fixed.extend(info for info in graph.input if info.name == name)
    seeds: dict[str, str] = {}
    terms = []
    nodes: list[NodeProto] = []
    for name, shape in outputs.items():
        seeds[name] = numbered(f"{name}/seed", taken)
        fixed.append(declared(seeds[name], DType.FLOAT, shape))
        flat, product, term = (numbered(f"{name}/{word}", taken) for word in ("wide", "seeded", "objective"))
        nodes.append(new_node("Cast", [name], flat, flat, to=DType.FLOAT.code))
        nodes.append(new_node("Mul", [flat, seeds[name]], product, product))
        nodes.append(new_node("ReduceSum", [product], term, term, keepdims=0))
        terms.append(term)
    loss = numbered("objective", taken)
    nodes.append(new_node("Sum", terms, loss, loss))
    graph.node.extend(nodes)
    for node in (
        n for n in graph.node if n.metadata_props
    ):  # an op that stops gradients in training still passes errors on
        refill(node, "metadata_props", [entry for entry in node.metadata_props if entry.key != STOP])
    refill(graph, "input", fixed)
    graph.ClearField("value_info")
    refill(graph, "output", [declared(loss, DType.FLOAT, ())])
    return replace(model, proto=proto), loss, seeds


def _scattering(model: Model) -> Model:
    """Return the model at an opset at which gathers have gradients, if it can be moved there."""
    view = View.of(model)
    if view.opsets.get("", FIRST_SCATTER_ADD) >= FIRST_SCATTER_ADD:
        return model
    moved = moved_to(view, FIRST_SCATTER_ADD)
    return model if isinstance(moved, str) else moved.model


def _dark(view: View, names: Sequence[str], loss: str, blocked: Mapping[str, str]) -> dict[str, str]:
    """Return the values whose effect on the loss gradients do not show, with the reason.

    They reach the loss through a blocked op, or only through steps and integers, whose derivative is 0.
    """
    ids = {v.name: v.id for v in view.values if v.scope == MAIN}
    target = ids[loss]
    reason: dict[ValueId, str] = {}
    reaches: set[ValueId] = {target}
    smooth: set[ValueId] = {target}
    for op_id in reversed(view.scopes[MAIN].ops):
        op = view.ops[op_id]
        outputs = [v for v in op.outputs if v is not None]
        if op.kind in _UNMOVED or not reaches.intersection(outputs):
            continue
        because = next((reason[v] for v in outputs if v in reason), None)
        if op.name in blocked:
            because = f"{op.kind} {op.name!r} has no gradient"
        inputs = [*[v for v in op.inputs if v is not None], *captures(view, op)]
        flows = op.name not in blocked and not smooth.isdisjoint(outputs)
        for slot, value in enumerate(inputs):
            reaches.add(value)
            if because is not None:
                reason.setdefault(value, because)
            if flows and _passes(op.domain, op.op_type, slot, len(op.inputs)) and floating(view, value):
                smooth.add(value)
    dark = {}
    for name in names:
        value = ids[name]
        if value in reason:
            dark[name] = reason[value]
        elif value in reaches and value not in smooth:
            dark[name] = "it reaches the outputs only through steps and integers"
    return dark


def _passes(domain: str, op_type: str, slot: int, inputs: int) -> bool:
    """True if the gradient rule of an op lets gradients through to an input; captured values count as such."""
    from amp_rewrite.rewrite.autodiff.vjp.rule import Stop
    from amp_rewrite.rewrite.autodiff.vjp.table import VJPS

    row = VJPS.get((domain, op_type))
    return row is None or slot >= inputs or not isinstance(row.entry(slot), Stop)


_UNMOVED = ELEMENTLESS | {"IsNaN"}
"""Ops whose results no rounding of a finite value changes."""


class _Measuring:
    """Appends the nodes that measure sites; equal sites share theirs."""

    def __init__(self, b: Builder) -> None:
        self.b = b
        self.rows: list[str] = []
        self.zero, self.infinity = b.scalar(0.0, DType.FLOAT), b.scalar(np.inf, DType.FLOAT)
        self.nothing = b.constant(np.zeros(WIDTH, np.float32))
        self.sound = b.constant(np.zeros(2, np.float32))

    def add(self, name: str, low: str, gradient: str | None, *, careful: bool) -> None:
        """Add a row: sum (g·δ)², sum |g·δ|, sum g·δ, lost, wild. Squares that underflow are far below any error."""
        if gradient is None:
            self.rows.append(self.nothing)
            return
        b = self.b
        delta = b.op("Sub", low, name)
        if not careful:
            self._sums(b.op("Mul", gradient, delta), self.sound)
            return
        exists = b.op("Less", b.op("Abs", delta), self.infinity)
        over = b.op("And", b.op("Less", b.op("Abs", name), self.infinity), b.op("Not", exists))
        product = b.op("Mul", gradient, b.op("Where", exists, delta, self.zero))
        tame = b.op("Less", b.op("Abs", product), self.infinity)
        felt = b.op("Where", over, b.op("Abs", gradient), self.zero)
        lost = b.op("ReduceSum", b.reshape(felt, [-1]), keepdims=1)
        wild = b.op("ReduceSum", b.reshape(b.cast(b.op("Not", tame), DType.FLOAT, of=DType.BOOL), [-1]), keepdims=1)
        self._sums(b.op("Where", tame, product, self.zero), lost, wild)

    def _sums(self, effect: str, *flaws: str) -> None:
        b = self.b
        flat = b.reshape(effect, [-1])
        sums = (b.op(kind, flat, keepdims=1) for kind in ("ReduceSumSquare", "ReduceL1", "ReduceSum"))
        self.rows.append(b.op("Concat", *sums, *flaws, axis=0))

    def packed(self) -> list[NodeProto]:
        """Return the nodes that join all rows, the last site first, as the backward pass comes to them."""
        self.result = self.b.fresh("measured")
        joined, nodes = self.rows[-1], []
        for i, row in enumerate(reversed(self.rows[:-1])):
            name = self.result if i == len(self.rows) - 2 else self.b.fresh("measured")
            nodes.append(new_node("Concat", [row, joined], name, name, axis=0))
            joined = name
        if len(self.rows) == 1:
            nodes.append(new_node("Identity", [joined], self.result, self.result))
        return nodes
