"""Runs that bounds must hold for: in float32, and rounded to a low type as a conversion would.

A check compares every number of every value with the box, the ball, its blocks and the sum that the walk proved.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np
import onnxruntime
from onnx import ModelProto, helper

from amp_rewrite.decide.bounds.state import Ball, State
from amp_rewrite.decide.bounds.walk import Walk
from amp_rewrite.decide.bounds.weights import BLOCK
from amp_rewrite.dtypes import DType
from amp_rewrite.files.model import Model
from amp_rewrite.ir.view import MAIN, View
from amp_rewrite.pipeline.convert import convert
from amp_rewrite.rewrite.emulate import emulate

FILL = 1e4
"""Numbers of a value with a mask's fill that count as the fill."""


class Probe:
    """A model whose values can all be seen, in float32 and rounded, and its walk.

    Ops sum in float32 inside: docs/concepts/bounds.md names the kernels that do not, which bounds leave out.
    """

    def __init__(self, proto: ModelProto, to: DType = DType.FLOAT16, inputs: Mapping[str, tuple[float, float]] = {}):
        self.view = View.of(Model.load(proto))
        self.walk = Walk.of(self.view, to, inputs)
        names = {v.name: v.id for v in self.view.values if v.scope == MAIN and self._shown(v.id)}
        self.states = {name: self.walk.state(value) for name, value in names.items()}
        lowered = convert(proto, to=to, level="unsafe-force-all", safety="none", target="onnx", fuse="none").model
        self.runs = [_session(proto, names), _session(emulate(lowered, accumulate="float32").to_proto(), names)]

    def _shown(self, value: int) -> bool:
        dtype = self.view.tensor_dtype(value)  # type: ignore[arg-type]
        held = self.view.values[value]
        return dtype is not None and dtype.floating and held.producer is not None and held.tensor is None

    def values(self, feed: Mapping[str, np.ndarray]) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
        """All values of each run: 0 is float32, 1 rounded."""
        for number, (session, names) in enumerate(self.runs):
            yield number, dict(zip(names, session.run(names, dict(feed)), strict=True))

    def violations(self, feed: Mapping[str, np.ndarray], lowered: float = 1.0) -> list[str]:
        """What exceeds its bound, each bound times `lowered`. A run ends with its first value that is not finite."""
        found = []
        for number, values in self.values(feed):
            finite = True
            for name in (n for n in self.states if n in values):
                array = np.asarray(values[name], np.float64)
                state = self.states[name]
                if state.fills:
                    continue
                finite = finite and bool(np.isfinite(array).all())
                if not finite:
                    break  # a value overflowed: what comes after is no finite run
                fault = exceeded(state, array, lowered)
                if fault:
                    found.append(f"{name} in run {number}: {fault}")
        return found


def exceeded(state: State, array: np.ndarray, lowered: float = 1.0) -> str:
    """The part of a state that an array exceeds; nothing if it holds."""
    if not array.size:
        return ""
    lo, hi = (np.broadcast_to(end, np.broadcast_shapes(end.shape, array.shape)) for end in (state.lo, state.hi))
    if lo.shape != array.shape:
        return f"has the shape {array.shape}, its box {lo.shape}"
    if (array > hi * lowered).any() or (array < lo * lowered).any():
        return f"{array.min():.9g} to {array.max():.9g} outside [{lo.min():.9g}, {hi.max():.9g}]"
    if state.total < math.inf and (array.sum(axis=state.along).max() > state.total * lowered or array.min() < -1e-9):
        return f"sums to {array.sum(axis=state.along).max():.9g}, more than {state.total:.9g}"
    return _outside(state.ball, array, lowered) if state.ball is not None else ""


def _outside(ball: Ball, array: np.ndarray, lowered: float) -> str:
    away = array - (0.0 if ball.center is None else ball.center)
    away = away / (1.0 if ball.scale is None else ball.scale)
    norms = np.sqrt(np.square(away).sum(axis=ball.axes, keepdims=True))
    if tuple(array.shape[axis] for axis in ball.axes) != ball.sizes:
        return f"has the shape {array.shape}, its ball {ball.sizes} along {ball.axes}"
    if (norms > ball.radius * lowered).any():
        return f"norm {norms.max():.9g}, more than {np.max(ball.radius):.9g}"
    if ball.blocks is not None:
        parts = away.reshape(*away.shape[:-1], -1, BLOCK)
        if (np.sqrt(np.square(parts).sum(axis=-1)) > ball.blocks * lowered).any():
            return "a block is longer than its bound"
    return ""


def _session(proto: ModelProto, names: Mapping[str, int]) -> tuple[onnxruntime.InferenceSession, list[str]]:
    """A session that gives these values, as they are computed: without optimizations."""
    shown = ModelProto()
    shown.CopyFrom(proto)
    made = {name for node in shown.graph.node for name in node.output}
    held = {port.name for port in shown.graph.output}
    del shown.graph.value_info[:]
    shown.graph.output.extend(helper.make_empty_tensor_value_info(n) for n in names if n in made - held)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(shown.SerializeToString(), options, providers=["CPUExecutionProvider"])
    floats = [o.name for o in session.get_outputs() if o.name in names and o.type == "tensor(float)"]
    return session, floats


def feeds(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Numbers of an input: of any size, in rows alike, with outliers, with far means, or a single one."""
    x = rng.standard_normal(shape)
    match int(rng.integers(6)):
        case 0:
            x *= 10.0 ** rng.uniform(-4, 3)
        case 1:
            x = x * 0.01 + rng.uniform(-100, 100)
        case 2:
            x = np.sign(x) * 10.0 ** rng.uniform(-1, 2)
        case 3:
            x = x * (rng.random(shape) < 0.1) * 100
        case 4:
            flat = np.zeros(math.prod(shape))
            flat[int(rng.integers(flat.size))] = rng.choice([-1, 1]) * 10.0 ** rng.uniform(0, 3)
            x = flat.reshape(shape)
    return x.astype(np.float32)
