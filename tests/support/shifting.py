"""Models with values shifted by random exponents, and the bits that onnxruntime computes of a model."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, helper, numpy_helper

from amp_rewrite.dtypes import DType
from amp_rewrite.files.model import Model
from amp_rewrite.files.protos import clone
from amp_rewrite.ir.view import View
from amp_rewrite.rewrite.shift.emit import Shift, apply_shift
from amp_rewrite.rewrite.shift.plan import Equations, ShiftPlan, ShiftRequest, solve_classes
from amp_rewrite.runtime.runner import Runner, SessionOptions

WANT = ShiftRequest(DType.FLOAT16, 2.0)
EXPONENTS = (0, 0, 1, 2, 3, 6, -2)


def bits(model: ModelProto, feed: Mapping[str, Any]) -> list[bytes]:
    """The outputs on one thread, without optimizations, as bytes; NaN has one form."""
    runner = Runner.open(Model.load(model), SessionOptions(optimized=False, threads=1, spinning=False))
    return [_bytes(value) for value in runner.run(feed).values()]


def _bytes(value: Any) -> bytes:
    if isinstance(value, list):
        return b"|".join(map(_bytes, value))
    array = np.asarray(value)
    if array.dtype.kind == "f":
        array = np.where(np.isnan(array), np.array(np.nan, array.dtype), array)
    return array.tobytes()


def shifted_at_random(view: View, seed: int) -> Shift:
    """The view with each class of values shifted by a random exponent."""
    rng = random.Random(seed)
    equations = Equations.of(view)
    exponents = {
        value: exponent
        for _, values in sorted(equations.members().items())
        if (exponent := rng.choice(EXPONENTS))
        for value in values
    }
    return apply_shift(equations, ShiftPlan(exponents), {}, WANT)


def shifted_to(view: View, exponents: Mapping[str, int]) -> Shift:
    """The view with the classes of values of these names shifted, and those that follow from them."""
    equations = Equations.of(view)
    roots = {equations.classes[v.id]: exponents[v.name] for v in view.values if v.name in exponents}
    solved = solve_classes(equations, roots)
    planned = {value: solved[root] for value, root in equations.classes.items() if root in solved}
    return apply_shift(equations, ShiftPlan(planned), {}, WANT)


def sandwiched(model: ModelProto) -> ModelProto:
    """The model with a Mul by one before each float32 input and after each float32 output, which take any shift."""
    out = clone(model)
    graph, ahead, behind = out.graph, [], []
    graph.initializer.append(numpy_helper.from_array(np.array(1, np.float32), "sandwich_one"))
    held = {tensor.name for tensor in graph.initializer}
    for formal in graph.input:
        if formal.name not in held and formal.type.tensor_type.elem_type == TensorProto.FLOAT:
            inner = f"{formal.name}_inner"
            ahead.append(helper.make_node("Mul", [formal.name, "sandwich_one"], [inner]))
            _renamed(graph.node, formal.name, inner, "input")
    for formal in graph.output:
        if formal.type.tensor_type.elem_type == TensorProto.FLOAT:
            inner = f"{formal.name}_inner"
            _renamed(graph.node, formal.name, inner, "output")
            behind.append(helper.make_node("Mul", [inner, "sandwich_one"], [formal.name]))
    nodes = [*ahead, *graph.node, *behind]
    del graph.node[:]
    graph.node.extend(nodes)
    return out


def _renamed(nodes: Sequence[onnx.NodeProto], old: str, new: str, side: str) -> None:
    for node in nodes:
        names = getattr(node, side)
        for slot, name in enumerate(names):
            if name == old:
                names[slot] = new
