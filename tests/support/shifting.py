"""Models with values shifted by random exponents, and the exact bits of a model's outputs."""

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
    """Return the outputs as bytes, computed on one thread without optimizations; all NaNs become equal."""
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
    """Shift each class of values by a random exponent."""
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
    """Shift the classes of the named values and the classes that depend on them."""
    equations = Equations.of(view)
    roots = {equations.classes[v.id]: exponents[v.name] for v in view.values if v.name in exponents}
    solved = solve_classes(equations, roots)
    planned = {value: solved[root] for value, root in equations.classes.items() if root in solved}
    return apply_shift(equations, ShiftPlan(planned), {}, WANT)


def sandwiched(model: ModelProto) -> ModelProto:
    """Add a Mul by one after each float32 input and before each float32 output, to absorb any shift."""
    out = clone(model)
    graph, first, last = out.graph, [], []
    graph.initializer.append(numpy_helper.from_array(np.array(1, np.float32), "sandwich_one"))
    constants = {tensor.name for tensor in graph.initializer}
    for formal in graph.input:
        if formal.name not in constants and formal.type.tensor_type.elem_type == TensorProto.FLOAT:
            inner = f"{formal.name}_inner"
            first.append(helper.make_node("Mul", [formal.name, "sandwich_one"], [inner]))
            _renamed(graph.node, formal.name, inner, "input")
    for formal in graph.output:
        if formal.type.tensor_type.elem_type == TensorProto.FLOAT:
            inner = f"{formal.name}_inner"
            _renamed(graph.node, formal.name, inner, "output")
            last.append(helper.make_node("Mul", [inner, "sandwich_one"], [formal.name]))
    nodes = [*first, *graph.node, *last]
    del graph.node[:]
    graph.node.extend(nodes)
    return out


def _renamed(nodes: Sequence[onnx.NodeProto], old: str, new: str, side: str) -> None:
    for node in nodes:
        names = getattr(node, side)
        for slot, name in enumerate(names):
            if name == old:
                names[slot] = new
