"""Application of a plan of Casts to a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, TypeProto, ValueInfoProto

from amp_rewrite.decide.plan import Bake, Cast, Plan, sets_low_inside
from amp_rewrite.dtypes import DType
from amp_rewrite.files.model import Model, baked
from amp_rewrite.files.protos import bodies, clone, refill
from amp_rewrite.ir.attributes import attribute, ints_attribute
from amp_rewrite.ir.names import unused
from amp_rewrite.ir.schema import DTYPE_ATTRIBUTES, normal_domain, set_element_type
from amp_rewrite.ir.versions import FIRST_BFLOAT16_CAST, FIRST_CAST_BY_CODE, FIRST_CLIP_WITH_INPUTS
from amp_rewrite.ir.view import MAIN, Op, OpId, Role, Scope, ScopeId, Value, ValueId, View
from amp_rewrite.rewrite.builder import declared, new_cast, new_constant, new_node, set_attribute


def apply(view: View, plan: Plan) -> Model:
    """Return a copy of the view's model with the plan applied.

    The graph is walked once. Everything else is preserved: node order, names, value_info, metadata, training_info,
    functions, sparse initializers, quantization annotations.

    Args:
        view: the indexed model.
        plan: the changes to this view, as returned by `plan_casts`.

    Returns:
        The new model.
    """
    proto = clone(view.model.proto)
    if not plan.empty:
        _Writer(view, plan).graph(proto.graph, view.scopes[MAIN])
        import_standard(proto)
    return replace(view.model, proto=proto, mends=())


def import_standard(proto: ModelProto) -> None:
    """Import an ai.onnx opset for the Casts if the model imports none, e.g. if all its ops are from ai.onnx.ml."""
    if not any(normal_domain(o.domain) == "" for o in proto.opset_import):
        proto.opset_import.add(domain="", version=FIRST_BFLOAT16_CAST)


class _Writer:
    def __init__(self, view: View, plan: Plan) -> None:
        self.view = view
        self.plan = plan
        self.opset = view.opsets.get("", FIRST_CAST_BY_CODE)
        self.casts: dict[ValueId, list[Cast]] = {}
        for cast in plan.casts:
            self.casts.setdefault(cast.value, []).append(cast)
        self.rewired: dict[OpId, list[tuple[int, str]]] = {}
        for use, name in plan.rewire.items():
            self.rewired.setdefault(use.op, []).append((use.slot, name))
        self.bakes: dict[ValueId, Bake] = {bake.value: bake for bake in plan.bakes}
        self.retyped = {**plan.retype, **{bake.value: bake.to for bake in plan.bakes if not bake.keeps_original}}
        unknown = (op for op in view.ops if op.signature is None and not op.bodies)
        self.unknown_results = {result for op in unknown for result in op.outputs}

    # -- one graph -----------------------------------------------------------------------------------

    def graph(self, graph: GraphProto, scope: Scope) -> None:
        """Rewrite a copied graph in place; `scope` is the indexed original."""
        values = self.view.values_of[scope.id]
        nodes = list(self._nodes(graph, scope, values))
        self._initializers(graph, values)
        types = {v.name: v.type for v in (*graph.input, *graph.value_info, *graph.output)}
        self._value_infos(graph, scope, values, types)
        refill(graph, "node", nodes)

    def _nodes(self, graph: GraphProto, scope: Scope, values: Sequence[Value]) -> Iterator[NodeProto]:
        for value in values:
            if value.producer is None and value.id in self.casts:
                yield from self._casts_of(value)
        for op_id, node in zip(scope.ops, graph.node, strict=True):
            op = self.view.ops[op_id]
            if op_id not in self.plan.drop:
                new = self._node(op, node)
                yield from self._separated(new) if op_id in self.plan.parted else (new,)
            for result in op.outputs:
                if result in self.bakes and (bake := self.bakes[result]).keeps_original:
                    constant = clone(op.node)
                    constant.name, constant.output[0] = unused(f"{bake.name}_constant", self.view.names), bake.name
                    self._set_baked(constant, bake)
                    yield constant
                if result in self.casts:
                    yield from self._casts_of(self.view.values[result])

    def _casts_of(self, value: Value) -> Iterator[NodeProto]:
        source = self.plan.rename.get(value.id, value.name)
        for cast in self.casts.get(value.id, ()):
            name = f"{cast.name}_cast" if cast.name != value.name else f"{source}_to_{cast.to.spelling}"
            clamped = source
            if cast.saturates:
                clamped = f"{cast.name}_clamped"
                yield from self._clamp(source, clamped, cast.to)
            yield new_cast(clamped, cast.name, cast.to, name=unused(name, self.view.names), opset=self.opset)

    def _clamp(self, source: str, clamped: str, to: DType) -> Iterator[NodeProto]:
        name = unused(clamped, self.view.names)
        if self.view.opset < FIRST_CLIP_WITH_INPUTS:
            yield new_node("Clip", [source], clamped, name=name, min=-to.max, max=to.max)
            return
        bounds = []
        for side, bound in (("min", -to.max), ("max", to.max)):
            bounds.append(f"{clamped}_{side}")
            value = onnx.helper.make_tensor("value", TensorProto.FLOAT, (), [bound])
            yield new_node("Constant", [], bounds[-1], name=unused(bounds[-1], self.view.names), value=value)
        yield new_node("Clip", [source, *bounds], clamped, name=name)

    def _separated(self, node: NodeProto) -> Iterator[NodeProto]:
        """Yield a Transpose between two Reshapes: the first appends a dimension of 1, and the second removes it.

        The Reshapes do not move data. Runtimes keep them, but would remove a Reshape to the same shape.
        """
        source, result = node.input[0], node.output[0]
        rank = len(ints_attribute(node, "perm"))
        ends = [unused(f"{result}_{suffix}", self.view.names) for suffix in ("expanded", "transposed")]
        node.input[0], node.output[0] = ends
        set_attribute(node, "perm", [*ints_attribute(node, "perm"), rank])
        yield from self._reshaped(source, ends[0], [0] * rank + [1])
        yield node
        yield from self._reshaped(ends[1], result, [0] * rank)

    def _reshaped(self, source: str, result: str, shape: Sequence[int]) -> Iterator[NodeProto]:
        shape_name = unused(f"{result}_shape", self.view.names)
        yield new_constant(shape_name, np.array(shape, np.int64))
        yield new_node("Reshape", [source, shape_name], result, name=unused(f"{result}_view", self.view.names))

    # -- one node ------------------------------------------------------------------------------------

    def _node(self, op: Op, node: NodeProto) -> NodeProto:
        for slot, name in self.rewired.get(op.id, ()):
            node.input[slot] = name
        for slot, result in enumerate(op.outputs):
            if result is not None and result in self.plan.rename:
                node.output[slot] = self.plan.rename[result]
        if op.id in self.plan.identities:
            node.op_type = "Identity"
            del node.attribute[:]
        elif op.id in self.plan.attributes:
            self._set_dtype(op, node, self.plan.attributes[op.id])
        if op.id in self.plan.raised:
            for each in node.attribute:
                if sets_low_inside(each):
                    each.i = DType.FLOAT.code
        bake = self.bakes.get(op.outputs[0]) if op.kind == "Constant" and op.outputs[0] is not None else None
        if bake is not None and not bake.keeps_original:
            self._set_baked(node, bake)
        for body, (_, graph) in zip(op.bodies, bodies(node) if op.bodies else (), strict=True):
            self.graph(graph, self.view.scopes[body])
        return node

    def _set_dtype(self, op: Op, node: NodeProto, dtype: DType) -> None:
        if op.kind == "ConstantOfShape":
            value = attribute(node, "value")
            zero = onnx.helper.make_tensor("value", TensorProto.FLOAT, (1,), [0.0])
            tensor = baked(value.t if value is not None else zero, dtype, model=self.view.model)
            set_attribute(node, "value", tensor)
            return
        name = DTYPE_ATTRIBUTES[op.domain, op.op_type]
        old = attribute(node, name)
        as_string = old is not None and old.type == AttributeProto.STRING  # Cast-1
        set_attribute(node, name, TensorProto.DataType.Name(dtype.code) if as_string else dtype.code)

    def _set_baked(self, node: NodeProto, bake: Bake) -> None:
        tensor = self.view.values[bake.value].tensor
        assert tensor is not None
        low = baked(tensor, bake.to, model=self.view.model)
        refill(node, "attribute", [onnx.helper.make_attribute("value", low)])

    # -- initializers, declarations ------------------------------------------------------------------

    def _initializers(self, graph: GraphProto, values: Sequence[Value]) -> None:
        bakes = {v.name: self.bakes[v.id] for v in values if v.role is Role.INITIALIZER and v.id in self.bakes}
        defaults = {v.name: self.plan.io[v.id] for v in values if v.overridable and v.id in self.plan.io}
        if not bakes and not defaults:
            return
        tensors: list[TensorProto] = []
        input_names = {v.name for v in graph.input}
        for tensor in graph.initializer:
            bake = bakes.get(tensor.name)
            if tensor.name in defaults:
                tensors.append(baked(tensor, defaults[tensor.name], model=self.view.model))
            elif bake is None or bake.keeps_original:
                tensors.append(tensor)
            if bake is not None:
                tensors.append(baked(tensor, bake.to, name=bake.name, model=self.view.model))
                if tensor.name in input_names and bake.keeps_original:  # IR 3 lists every initializer as an input
                    graph.input.append(declared(bake.name, bake.to, tensor.dims))
        refill(graph, "initializer", tensors)
        for formal in graph.input:
            bake = bakes.get(formal.name)
            if bake is not None and not bake.keeps_original:
                set_element_type(formal.type, bake.to)

    def _value_infos(
        self, graph: GraphProto, scope: Scope, values: Sequence[Value], types: dict[str, TypeProto]
    ) -> None:
        """Declare the planned types, and declare each new value if its source was declared.

        A captured value may be declared in the body that reads it.
        """
        by_name = {v.name: v for v in values}
        for formal in (*graph.input, *graph.output):
            value = by_name.get(formal.name)
            if value is not None and value.id in self.plan.io:
                set_element_type(formal.type, self.plan.io[value.id])
        if scope.parent is not None and any(info.name not in by_name for info in graph.value_info):
            by_name = {**self._visible(scope.parent), **by_name}
        dropped = {o for op in self.plan.drop for o in self.view.ops[op].outputs}
        infos: list[ValueInfoProto] = []
        for info in graph.value_info:
            value = by_name.get(info.name)
            if value is not None and value.id in dropped:
                continue
            if value is not None and value.id not in self.plan.rename and (dtype := self._declared(value)):
                set_element_type(info.type, dtype)
            infos.append(info)
        for value in values:
            if value.id in dropped:
                continue
            if value.name in types:
                infos.extend(self._new_infos(value, types))
            elif value.id in self.unknown_results and (dtype := self.view.tensor_dtype(value.id)) is not None:
                # The type was inferred from the readers of the value, which may now read a Cast.
                infos.append(declared(value.name, dtype, None))
        refill(graph, "value_info", infos)

    def _visible(self, scope: ScopeId) -> dict[str, Value]:
        local, outer = {v.name: v for v in self.view.values_of[scope]}, self.view.scopes[scope].parent
        return {**self._visible(outer), **local} if outer is not None else local

    def _declared(self, value: Value) -> DType | None:
        return self.retyped.get(value.id) or self.view.dtype(value.id)

    def _new_infos(self, value: Value, types: dict[str, TypeProto]) -> Iterable[ValueInfoProto]:
        source = types[value.name]
        fresh = [(cast.name, cast.to) for cast in self.casts.get(value.id, ())]
        if value.id in self.plan.rename:
            renamed = self.plan.retype.get(value.id) or self.view.dtype(value.id)  # a baked copy gets the old name
            fresh.append((self.plan.rename[value.id], renamed or DType.FLOAT))
        bake = self.bakes.get(value.id)
        if bake is not None and bake.keeps_original:
            fresh.append((bake.name, bake.to))
        for name, dtype in fresh:
            if name not in types and source.WhichOneof("value") == "tensor_type":
                info = ValueInfoProto(name=name)
                info.type.CopyFrom(source)
                set_element_type(info.type, dtype)
                yield info
