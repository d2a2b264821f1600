"""Float32 twins of mixed models, to round results on machines with unrounded half-precision kernels.

Every float16 or bfloat16 tensor becomes a float32 tensor with values of the low type: weights are rounded and widened,
and the result of a low op is cast to the low type and back. The widened twin does not round anything.
docs/concepts/emulation.md describes the limits of this method.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from onnx import AttributeProto, GraphProto, NodeProto, TensorProto, TypeProto

from amp_rewrite.dtypes import LOW_TYPES, DType
from amp_rewrite.errors import ModelError, PolicyError
from amp_rewrite.files.model import Model, ModelSource, baked
from amp_rewrite.files.protos import bodies, clone, refill
from amp_rewrite.ir.build import check_imports
from amp_rewrite.ir.dataflow import exact
from amp_rewrite.ir.names import claimed
from amp_rewrite.ir.op_classes import CASTS
from amp_rewrite.ir.schema import DTYPE_ATTRIBUTES, INNER_DTYPE_ATTRIBUTES, set_element_type, type_of_proto
from amp_rewrite.ir.versions import FIRST_BFLOAT16_CAST, FIRST_UNBATCHED_SCAN
from amp_rewrite.ir.view import MAIN, Op, Scope, Value, ValueId, View
from amp_rewrite.rewrite.apply import import_standard
from amp_rewrite.rewrite.builder import new_cast, new_node
from amp_rewrite.rewrite.device_arithmetic import CUDA, CUDA_ONLY, expanded
from amp_rewrite.rewrite.passes.inline import inlined
from amp_rewrite.rewrite.rounding_builder import RoundingBuilder

_KEPT_TYPES = {
    "numpy": frozenset({DType.FLOAT16}),
    "same": frozenset({DType.FLOAT16, DType.BFLOAT16}),
    "float32": frozenset[DType](),
}
# onnxruntime's norms of a sum, and the slot of the sum's bias. The norm itself computes in float32.
_SUMMED_INPUTS = {"com.microsoft::SkipLayerNormalization": 4, "com.microsoft::SkipSimplifiedLayerNormalization": 3}


def emulate(
    model: ModelSource,
    *,
    io: str = "numpy",
    rounding: bool = True,
    folder: str | Path | None = None,
) -> Model:
    """Return the model with float32 kernels and explicit rounding to float16 and bfloat16, for any float32 runtime.

    Inputs that become float32 are rounded first. Sequences and optionals always become float32, and their elements are
    assumed to have values of the low type. Local functions are inlined, and training_info is dropped. Names, order and
    shapes of inputs and outputs are preserved.

    Without `rounding` this returns the *widened* twin, which computes as if the low types of the model were float32.
    Its weights keep their stored values, inputs are not rounded, and Casts between float32 and low types become
    Identity. With io="float32", Casts to a low type remain only around ops without a float32 kernel. Use it as the
    float32 reference of a model that is already in half precision.

    Each op computes in float32 internally, and its result is rounded once, as in most CUDA kernels. Ops whose CUDA
    kernel rounds float16 in between are expanded: Conv with a bias, means, CumSum, InstanceNormalization, LSTM … An op
    whose rank or kernel is unknown computes in float32. Devices that accumulate in float16, such as WebGPU, have larger
    errors.

    Ops that no float32 kernel can replace (ops of unknown domains, BitCast, ops whose schema does not allow float32)
    keep their low type between Casts, with and without `rounding`. O(nodes + uses). Low weights remain in their files,
    except weights with a pending cast, which are read.

    Args:
        model: the model, in any form that `Model.load` takes; it is not changed.
        io: the inputs and outputs that keep their low type: "numpy" (only float16), "same" (all) or "float32" (none).
        rounding: False returns the widened twin.
        folder: the folder of a ModelProto's external data.

    Returns:
        The float32 twin.

    Raises:
        PolicyError: `io` is not one of these values.
        ModelError: the model is invalid.

    Example:
        >>> import amp_rewrite
        >>> twin = amp_rewrite.emulate(amp_rewrite.convert("model.onnx").model)
        >>> twin.save("emulated.onnx")
    """
    if io not in _KEPT_TYPES:
        raise PolicyError(f"unknown io {io!r} for emulate; use one of {', '.join(_KEPT_TYPES)}")
    return _twin(Model.load(model, folder=folder), _KEPT_TYPES[io], rounding)


def in_float32(model: Model, types: Collection[DType], edges: Collection[str] = ()) -> Model:
    """Return a model with float32 in place of `types`, without rounding to them.

    Inputs and outputs keep their types, except the ones named in `edges`.
    """
    return _twin(model, frozenset(types), False, edges, frozenset(types))


def _twin(
    source: Model,
    kept_types: frozenset[DType],
    rounding: bool,
    edges: Collection[str] = (),
    types: frozenset[DType] = frozenset(LOW_TYPES),
) -> Model:
    check_imports(source.proto)
    # Inlined, because calls to a local function may differ in their types.
    view = View.of(inlined(source))
    proto = clone(view.model.proto)
    proto.ClearField("training_info")
    _TwinWriter(view, types, kept_types, rounding, edges).graph(proto.graph, view.scopes[MAIN])
    import_standard(proto)
    return replace(view.model, proto=proto)


class _TwinWriter:
    """Rewriter of a copy of the model in one walk; `types`, called low here, become float32.

    `low_io`: inputs and outputs that keep their low type. `names`: the names of float32 twins that differ from the
    names of their values.
    """

    def __init__(
        self, view: View, types: frozenset[DType], kept_types: frozenset[DType], rounding: bool, edges: Collection[str]
    ) -> None:
        self.view = view
        self.types = types
        self.rounding = rounding
        self.taken = set(view.names)
        self.opset = view.opsets.get("", FIRST_BFLOAT16_CAST)
        self.recipes = CUDA if rounding and self.opset >= FIRST_UNBATCHED_SCAN else CUDA_ONLY
        main = view.scopes[MAIN]
        self.low_inputs = frozenset(filter(self._low_tensor, main.inputs))
        low_outputs = frozenset(filter(self._low_tensor, main.outputs))
        ends = (v for v in self.low_inputs | low_outputs if view.value_name(v) not in edges)
        self.low_io = frozenset(v for v in ends if view.dtype(v) in kept_types)
        separate = sorted(self.low_io | self.low_inputs if rounding else self.low_io)
        self.names = {v: claimed(f"{view.value_name(v)}_float32", self.taken) for v in separate}

    # -- values --------------------------------------------------------------------------------------

    def _low(self, value: ValueId | None) -> DType | None:
        dtype = self.view.dtype(value)
        return dtype if dtype in self.types else None

    def _low_tensor(self, value: ValueId | None) -> DType | None:
        return self._low(value) if value is not None and self.view.tensor_dtype(value) is not None else None

    def _name(self, value: ValueId) -> str:
        return self.names.get(value, self.view.value_name(value))

    # -- casts ---------------------------------------------------------------------------------------

    def _cast(self, source: str, target: str, to: DType) -> NodeProto:
        if to is DType.BFLOAT16 and self.opset < FIRST_BFLOAT16_CAST:
            raise ModelError(
                f"the model imports ai.onnx opset {self.opset}, which has no Cast to bfloat16; import opset "
                f"{FIRST_BFLOAT16_CAST} or later"
            )
        return new_cast(source, target, to, name=claimed(f"{target}_cast", self.taken), opset=self.opset)

    def _rounded(self, source: str, value: ValueId) -> Iterator[NodeProto]:
        dtype = self._low(value) or DType.FLOAT
        low = claimed(f"{self.view.value_name(value)}_{dtype.spelling}", self.taken)
        yield self._cast(source, low, dtype)
        yield self._cast(low, self._name(value), DType.FLOAT)

    # -- one graph -----------------------------------------------------------------------------------

    def graph(self, graph: GraphProto, scope: Scope) -> None:
        """Turn a copied graph into its twin, in place; `scope` is the index of the original."""
        nodes: list[NodeProto] = []
        for value in sorted(self.low_inputs) if scope.id == MAIN else ():
            name = self.view.value_name(value)
            if value in self.low_io:
                nodes.append(self._cast(name, self._name(value), DType.FLOAT))
            elif self.rounding:
                nodes.extend(self._rounded(name, value))
        for op_id, node in zip(scope.ops, graph.node, strict=True):
            nodes.extend(self._node(self.view.ops[op_id], node))
        for value in sorted(self.low_io - self.low_inputs) if scope.id == MAIN else ():
            nodes.append(self._cast(self._name(value), self.view.value_name(value), self._low(value) or DType.FLOAT))
        self._initializers(graph, {v.name: v for v in self.view.values_of[scope.id]})
        low_names = {self.view.value_name(v) for v in self.low_io} if scope.id == MAIN else set()
        for formal in (*graph.input, *graph.value_info, *graph.output):
            if formal.name not in low_names:
                self._widen_type(formal.type)
        refill(graph, "node", nodes)

    def _initializers(self, graph: GraphProto, values: dict[str, Value]) -> None:
        widened = list[TensorProto]()
        for tensor in graph.initializer:
            value = values[tensor.name]
            if value.id in self.low_inputs & self.low_io or not self._low(value.id):
                widened.append(tensor)
            else:
                name = tensor.name if value.id in self.low_inputs else self._name(value.id)
                widened.append(baked(tensor, DType.FLOAT, name=name, model=self.view.model))
        refill(graph, "initializer", widened)
        for sparse in graph.sparse_initializer:
            self._widen_tensor(sparse.values)
            sparse.values.name = self._name(values[sparse.values.name].id)

    # -- one node ------------------------------------------------------------------------------------

    def _node(self, op: Op, node: NodeProto) -> Iterator[NodeProto]:
        for slot, value in enumerate(op.inputs):
            if value is not None:
                node.input[slot] = self._name(value)
        for body, (_, graph) in zip(op.bodies, bodies(node), strict=True):
            self.graph(graph, self.view.scopes[body])
        if self._stays_low(op):
            yield from self._low_op(op, node)
        elif op.kind in CASTS:
            yield from self._cast_op(op, node)
        else:
            self._widen(op, node.attribute)
            recipe, expansion = self.recipes.get(op.kind), None
            low = self._low_tensor(next(iter(op.results), None)) if self.rounding else None
            if recipe is not None and (low is DType.FLOAT16 or op.kind in CUDA_ONLY):
                expansion = expanded(self.view, recipe, op, node, self.taken, low)
            if expansion is not None:
                yield from expansion[0]
                for value, result in zip(op.outputs, expansion[1], strict=False):
                    if value is not None:
                        name = self._name(value)
                        yield new_node("Identity", [result], name, claimed(f"{name}_written", self.taken))
                return
            if op.kind in _SUMMED_INPUTS and self.rounding and self._low(op.inputs[0]):
                yield from self._sum_first(op, node)
            yield from self._widened(op, node)

    def _sum_first(self, op: Op, node: NodeProto) -> Iterator[NodeProto]:
        """Yield the sum before a norm, rounded after each addition as in the norm's kernels.

        The node then adds two halves of the sum, which is exact.
        """
        b, total = RoundingBuilder(self.taken, opset=self.opset, region=op.name), node.input[0]
        b.low_type = self._low(op.inputs[0]) or DType.FLOAT16
        for slot in (_SUMMED_INPUTS[op.kind], 1):
            if slot < len(op.inputs) and op.inputs[slot] is not None:
                total = b.low("Add", total, node.input[slot])
                node.input[slot] = ""
        node.input[0] = node.input[1] = b.op("Mul", total, b.scalar(0.5, DType.FLOAT))
        yield from b.nodes

    def _widened(self, op: Op, node: NodeProto) -> Iterator[NodeProto]:
        casts: list[NodeProto] = []
        for slot, value in enumerate(op.outputs):
            if value is None or self._low(value) is None:
                continue
            node.output[slot] = self._name(value)
            if self.rounding and self._low_tensor(value) and not exact(op):
                node.output[slot] = claimed(f"{self.view.value_name(value)}_unrounded", self.taken)
                casts.extend(self._rounded(node.output[slot], value))
        yield node
        yield from casts

    def _cast_op(self, op: Op, node: NodeProto) -> Iterator[NodeProto]:
        """Yield the twin of a Cast: a Cast to a low type rounds, and a Cast from a low type reads rounded values."""
        before, after = op.inputs[0], op.outputs[0]
        assert before is not None and after is not None
        source_type, target_type = self.view.dtype(before), self.view.dtype(after)
        low_source, low_target = self._low(before), self._low(after)
        if self.rounding:
            unchanged = target_type is source_type or (target_type is DType.FLOAT and low_source is not None)
        else:
            unchanged = {source_type, target_type} <= {DType.FLOAT, *self.types}
        if unchanged and (low_source or low_target):
            yield new_node("Identity", node.input[:1], self._name(after), node.name)
        elif not low_target:
            yield node
        elif self.rounding:
            yield from self._rounded(node.input[0], after)
        else:
            yield self._cast(node.input[0], self._name(after), DType.FLOAT)

    def _stays_low(self, op: Op) -> bool:
        if op.bodies or not any(map(self._low, op.ports)):
            return False
        if op.signature is None or op.kind == "BitCast":
            return True
        if op.kind == "Cast" and self.view.dtype(op.outputs[0]) is DType.STRING:
            return self.rounding  # a low value has fewer digits
        ports = [op.signature.input_variable(i) for i, v in enumerate(op.inputs) if self._low(v)]
        ports += [op.signature.output_variable(i) for i, v in enumerate(op.outputs) if self._low(v)]
        return any(p is not None and not op.signature.admits(p, DType.FLOAT) for p in ports)

    def _low_op(self, op: Op, node: NodeProto) -> Iterator[NodeProto]:
        casts: list[NodeProto] = []
        for slot, value in enumerate(op.inputs):
            dtype = self._low_tensor(value)
            if value is not None and dtype is not None:
                node.input[slot] = claimed(f"{self._name(value)}_{dtype.spelling}", self.taken)
                yield self._cast(self._name(value), node.input[slot], dtype)
        for slot, value in enumerate(op.outputs):
            if value is not None and self._low_tensor(value):
                node.output[slot] = claimed(f"{self.view.value_name(value)}_low", self.taken)
                casts.append(self._cast(node.output[slot], self._name(value), DType.FLOAT))
        yield node
        yield from casts

    # -- attributes ----------------------------------------------------------------------------------

    def _widen(self, op: Op, attributes: Iterable[AttributeProto]) -> None:
        dtype_attributes = {DTYPE_ATTRIBUTES.get((op.domain, op.op_type)), *INNER_DTYPE_ATTRIBUTES}
        for attribute in attributes:
            for tensor in (attribute.t, attribute.sparse_tensor.values, *attribute.tensors):
                self._widen_tensor(tensor)
            if attribute.name in dtype_attributes and DType.of(attribute.i) in self.types:
                attribute.i = TensorProto.FLOAT
            self._widen_type(attribute.tp)

    def _widen_tensor(self, tensor: TensorProto) -> None:
        if DType.of(tensor.data_type) in self.types:
            tensor.CopyFrom(baked(tensor, DType.FLOAT, model=self.view.model))

    def _widen_type(self, proto: TypeProto) -> None:
        declared = type_of_proto(proto)
        if declared is not None and declared.dtype in self.types:
            set_element_type(proto, DType.FLOAT)
