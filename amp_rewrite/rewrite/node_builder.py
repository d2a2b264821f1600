"""Builder of node lists, with equal nodes written once, each in the opset's form."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx
import onnx.helper
from onnx import NodeProto, TensorProto, ValueInfoProto
from onnx.numpy_helper import from_array

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import AmpRewriteError, ModelError
from amp_rewrite.files.casting import Array
from amp_rewrite.ir.names import numbered
from amp_rewrite.ir.op_classes import UNREPEATABLE
from amp_rewrite.ir.versions import FIRST_ALLOWZERO, FIRST_AXES_INPUT, FIRST_REDUCTION_AXES_INPUT


class NodeBuilder:
    """Builder of a list of nodes with fresh names.

    Nodes are numbered within a *region* and named after it. Equal ops with equal inputs and attributes become one
    node: appending the op again returns the same name, so formulas can repeat their terms. `opset` is the version of
    ai.onnx; ops whose form depends on it have their own methods. Code that appends to `nodes` directly gets names from
    `fresh`.
    """

    error: type[AmpRewriteError] = ModelError
    """The exception to raise for a form missing from the opset."""

    def __init__(self, taken: set[str], *, opset: int, region: str) -> None:
        self.opset = opset
        self.nodes: list[NodeProto] = []
        self._taken = taken
        self._region = region
        self._known: dict[tuple[object, ...], tuple[str, ...]] = {}
        self._dtypes: dict[str, DType] = {}
        self._counts: Counter[str] = Counter()

    @contextmanager
    def region(self, name: str) -> Iterator[None]:
        """Name the nodes appended inside the `with` block after another region, for example "update/Mul_3"."""
        before, self._region = self._region, name
        try:
            yield
        finally:
            self._region = before

    def fresh(self, name: str) -> str:
        """Reserve an unused name derived from this one, and return it."""
        return numbered(name, self._taken)

    def _numbered(self, op_type: str) -> str:
        stem = f"{self._region}/{op_type}"
        self._counts[stem] += 1
        return self.fresh(f"{stem}_{self._counts[stem] - 1}")

    def dtype(self, name: str) -> DType | None:
        return self._dtypes.get(name)

    def op(self, op_type: str, *inputs: str, domain: str = "", **attributes: Any) -> str:
        """Append a node with one output; return the name of the output. Attributes of None are omitted."""
        return self.ops(op_type, *inputs, results=1, domain=domain, **attributes)[0]

    def ops(self, op_type: str, *inputs: str, results: int, domain: str = "", **attributes: Any) -> tuple[str, ...]:
        """Append a node with several outputs; return their names. An input of "" is omitted."""
        return self._once(onnx.helper.make_node(op_type, inputs, [], domain=domain, **attributes), results)

    def like(self, node: NodeProto, inputs: Sequence[str]) -> tuple[str, ...]:
        """Append a copy of a node with other inputs; return the names of its outputs."""
        copy = NodeProto(op_type=node.op_type, domain=node.domain, input=inputs, attribute=node.attribute)
        return self._once(copy, len(node.output))

    def _once(self, node: NodeProto, results: int) -> tuple[str, ...]:
        attributes = tuple(a.SerializeToString(deterministic=True) for a in node.attribute)
        key = (node.domain, node.op_type, tuple(node.input), results, attributes)
        if key in self._known:
            return self._known[key]
        node.name = self._numbered(node.op_type)
        # A single output gets the name of its node: in ONNX, names of nodes and of values do not collide.
        outputs = [node.name] if results == 1 else [self.fresh(f"{node.name}_{i}") for i in range(results)]
        node.output.extend(outputs)
        self.nodes.append(node)
        if node.op_type not in UNREPEATABLE:
            self._known[key] = tuple(outputs)
        return tuple(outputs)

    def inner(self, region: str) -> NodeBuilder:
        return NodeBuilder(self._taken, opset=self.opset, region=region)

    def choice(
        self, condition: str, then: Callable[[NodeBuilder], str], otherwise: Callable[[NodeBuilder], str]
    ) -> str:
        """Append an If with one output. Each function appends the nodes of a branch and returns the branch's result."""
        branches = {}
        for name, build in (("then_branch", then), ("else_branch", otherwise)):
            inner = self.inner(self._region)
            result = build(inner)  # a body can read the values of the graph around it
            branches[name] = onnx.helper.make_graph(inner.nodes, result, [], [ValueInfoProto(name=result)])
        return self.op("If", condition, **branches)

    def name(self, source: str, result: str) -> None:
        """Append an Identity to give a value another name; no other node may output this name."""
        self.nodes.append(onnx.helper.make_node("Identity", [source], [result], name=self._numbered("Identity")))

    def constant(self, values: Array) -> str:
        name = self.op("Constant", value=from_array(values))
        self._dtypes[name] = DType(onnx.helper.np_dtype_to_tensor_dtype(values.dtype))
        return name

    def scalar(self, value: float, dtype: DType) -> str:
        return self.constant(np.array(value, dtype.numpy))

    def ints(self, values: Sequence[int]) -> str:
        return self.constant(np.array(values, np.int64))

    # -- forms that differ between opsets ----------------------------------------------------------------

    def requires(self, opset: int, form: str) -> None:
        """Raise `error` if the model's opset is too low for a form; `form` describes it in the message."""
        if self.opset < opset:
            raise self.error(
                f"{form} needs ai.onnx opset {opset}, but the model imports {self.opset}; convert the model with"
                " onnx.version_converter, or export the model again"
            )

    def reduce(self, op_type: str, x: str, axes: Sequence[int] | str | None, *, keepdims: bool) -> str:
        """Reduce over these axes: None for all, an empty list for none, or the name of a value with the axes.

        Computed axes need ReduceSum or opset 18.
        """
        if axes is None:
            return self.op(op_type, x, keepdims=int(keepdims))
        if not axes:
            return x
        first = FIRST_AXES_INPUT if op_type == "ReduceSum" else FIRST_REDUCTION_AXES_INPUT
        attributes = {"keepdims": int(keepdims), "noop_with_empty_axes": 1 if isinstance(axes, str) else None}
        return self._listing(op_type, x, "axes", axes, first, results=1, **attributes)[0]

    def reshape(self, x: str, shape: Sequence[int] | str) -> str:
        """Reshape to these dims, or to computed dims. From opset 14 on, a 0 is a dim of size 0."""
        if isinstance(shape, str):
            return self.op("Reshape", x, shape, allowzero=1 if self.opset >= FIRST_ALLOWZERO else None)
        zeros = 0 in shape
        if zeros:
            self.requires(FIRST_ALLOWZERO, "Reshape to a dim of 0")
        return self.op("Reshape", x, self.ints(shape), allowzero=1 if zeros else None)

    def unsqueeze(self, x: str, axes: Sequence[int] | str) -> str:
        """Insert dims of size 1 at these axes of the result."""
        return self._listing("Unsqueeze", x, "axes", axes, results=1)[0] if axes else x

    def squeeze(self, x: str, axes: Sequence[int]) -> str:
        return self._listing("Squeeze", x, "axes", axes, results=1)[0] if axes else x

    def split(self, x: str, sizes: Sequence[int] | str, axis: int, *, results: int) -> tuple[str, ...]:
        """Split into parts of these sizes, or of computed sizes; return the names of the parts."""
        return self._listing("Split", x, "split", sizes, results=results, axis=axis)

    def _listing(
        self, op_type: str, x: str, name: str, listed: Sequence[int] | str, first: int = FIRST_AXES_INPUT, **others: Any
    ) -> tuple[str, ...]:
        """Append an op with a list: an attribute before opset `first`, an input from that opset on."""
        if isinstance(listed, str):
            self.requires(first, f"{op_type} with computed {name}")
            return self.ops(op_type, x, listed, **others)
        if self.opset < first:
            others[name] = list(listed)
            return self.ops(op_type, x, **others)
        return self.ops(op_type, x, self.ints(listed), **others)

    def cast(self, x: str, to: DType, *, of: DType | None = None) -> str:
        """Cast a value, unless it already has the type; `of` is its type if the builder does not know it."""
        return x if (of or self.dtype(x)) is to else self.op("Cast", x, to=to.code)

    def full(self, shape: str, value: float, dtype: DType) -> str:
        """Append a tensor filled with one value, and return its name; `shape` is the name of its shape."""
        fill: TensorProto = from_array(np.array([value], dtype.numpy))
        return self.op("ConstantOfShape", shape, value=fill)
