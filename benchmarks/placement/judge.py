"""What a converted model is like beside its source: Casts, predicted time, products; and which ops it keeps float32."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from amp_rewrite import DType, Model, View
from amp_rewrite.decide.placement.cost_model import ATTOSECONDS, CostModel
from amp_rewrite.decide.placement.cut_problem import PAIRS
from amp_rewrite.ir.nodes import MAIN, Op, ValueId
from amp_rewrite.pipeline.convert import Converted
from amp_rewrite.runtime.roofline import ROOFS

COMPUTE = ("MatMul", "Conv", "Gemm")


@dataclass(frozen=True, slots=True)
class Judged:
    """Casts more than the source has, whatever their types; predicted µs by GPU; and of all products the low ones."""

    casts: int
    cost: dict[str, float]
    low: int
    compute: int


def judged(converted: Path, source: Path, gpus: Sequence[str]) -> Judged:
    """What a converted model is like, by what stands in it. Raises ModelError if it is no model that can be read."""
    view, before = View.of(Model.load(converted)), View.of(Model.load(source))
    sizes = _sizes(view, before)
    cost = {}
    for gpu in gpus:
        work = CostModel(view, ROOFS[gpu], DType.FLOAT16, sizes)
        cost[gpu] = round(sum(_cost(view, work, op) for op in view.ops) / ATTOSECONDS * 1e6, 4)
    products = [op for op in view.ops if op.kind in COMPUTE]
    low = sum(op.inputs[0] is not None and view.dtype(op.inputs[0]) is DType.FLOAT16 for op in products)
    return Judged(_casts(view) - _casts(before), cost, low, len(products))


def _sizes(view: View, source: View) -> dict[ValueId, int]:
    """Elements of a converted model's values: as many as those of their names have in the source, or of their Casts."""
    asked = CostModel(source, ROOFS["A100"], DType.FLOAT16)
    named = {value.name: asked.size(value.id) for value in source.values if value.scope == MAIN}
    found = {v.id: named[v.name] for v in view.values if v.scope == MAIN and v.name in named}
    for op in view.ops:
        ends = [v for v in (op.inputs[0], op.outputs[0]) if v is not None] if op.kind == "Cast" else []
        known = next((found[v] for v in ends if v in found), None)  # an output keeps its name behind its Cast
        found.update({v: known for v in ends if v not in found} if known is not None else {})
    return found


def _casts(view: View) -> int:
    return sum(op.kind == "Cast" for op in view.ops)


def _cost(view: View, work: CostModel, op: Op) -> int:
    """What one op costs beyond running it in the low type, in attoseconds: a Cast, float32, a pair parted by a Cast."""
    value = op.inputs[0] if op.inputs else None
    if op.kind == "Cast":
        ends = {view.dtype(v) for v in (value, op.outputs[0]) if v is not None}
        if value is None or ends != {DType.FLOAT, DType.FLOAT16} or view.constant(value) is not None:
            return 0
        maker = view.producer(value)
        parted = maker is not None and any((maker.kind, reader.kind) in PAIRS for reader in _readers(view, op))
        return work.cast(value) + (work.trip(value) if parted and len(view.uses[value]) == 1 else 0)
    if op.bodies:
        return 0
    ports = [v for v in (*op.inputs, *op.outputs) if v is not None and view.dtype(v) is DType.FLOAT]
    return work.loss(op, ports, main=value in ports) if ports else 0


def _readers(view: View, op: Op) -> Iterator[Op]:
    return view.readers(op.outputs[0]) if op.outputs[0] is not None else iter(())


def kept(source: View, converted: Converted) -> list[str]:
    """The nodes of a model that a conversion leaves float32: those that it fused are what became of them."""
    found = {name: op for op in converted.view.ops for name in op.node.output if name}
    became: dict[int, bool] = {}
    for op in reversed(source.ops):
        mine = next((found[name] for name in op.node.output if name in found), None)
        if mine is not None:
            paint = converted.coloring.of(mine.id)
            became[op.id] = paint is not None and paint.dtype is DType.FLOAT
        else:
            readers = (use.op for v in op.outputs if v is not None for use in source.uses[v])
            became[op.id] = any(became.get(reader, False) for reader in readers)
    return [op.name for op in source.ops if became[op.id] and op.kind != "Constant"]


def raised(converted: Path, low: Sequence[str]) -> list[str]:
    """Of the products that one conversion lowers, by name, those that stand in another one in float32."""
    view = View.of(Model.load(converted))
    float32 = {op.name for op in view.ops if op.kind in COMPUTE and op.inputs[0] is not None and _is_float(view, op)}
    return [name for name in low if name in float32]


def _is_float(view: View, op: Op) -> bool:
    value = op.inputs[0]
    return value is not None and view.dtype(value) is DType.FLOAT


def products(source: View, converted: Converted) -> list[str]:
    """The products of a model that a conversion lowers, by name."""
    names = {op.name for op in source.ops if op.kind in COMPUTE}
    paints = ((op.name, converted.coloring.of(op.id)) for op in converted.view.ops if op.name in names)
    return [name for name, paint in paints if paint is not None and paint.dtype is DType.FLOAT16]


def pattern(name: str) -> str:
    """The pattern that one op's name matches, and no other."""
    return "re:^" + re.escape(name).replace(",", r"\x2c") + "$"
