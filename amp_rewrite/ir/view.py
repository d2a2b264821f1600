"""A read-only index over a model: ops, values, uses, scopes, and the element type of every value.

Ops are in topological order across scopes: an op follows the producers of its inputs, and an op with bodies (If, Loop,
Scan …) also follows the ops of its bodies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, update_wrapper
from itertools import chain
from operator import attrgetter
from typing import Any, Concatenate, ParamSpec, TypeVar

import networkx as nx
from onnx import ModelProto, NodeProto, TensorProto

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import Finding
from amp_rewrite.files.casting import Array, Fit
from amp_rewrite.files.model import Model
from amp_rewrite.files.protos import all_graphs, bodies, clone, refill
from amp_rewrite.ir.build import Index, UnsortedError, build
from amp_rewrite.ir.gc_paused import gc_paused
from amp_rewrite.ir.nodes import MAIN, Op, OpId, Role, Scope, ScopeId, TypeVariable, Use, Value, ValueId
from amp_rewrite.ir.schema import TENSOR, Signature, ValueType, unknown

__all__ = ["MAIN", "Op", "OpId", "Role", "Scope", "ScopeId", "TypeVariable", "Use", "Value", "ValueId", "View", "once"]

P = ParamSpec("P")
R = TypeVar("R")


def once(analysis: Callable[Concatenate[View, P], R]) -> Callable[Concatenate[View, P], R]:
    """Cache an analysis by view and arguments; callers share the result and must not change it."""

    def wrapper(view: View, /, *args: P.args, **kwargs: P.kwargs) -> R:
        key = analysis, args, tuple(kwargs.items())
        if key not in view._results:
            view._results[key] = analysis(view, *args, **kwargs)
        result: R = view._results[key]
        return result

    return update_wrapper(wrapper, analysis)


@dataclass(repr=False, eq=False)
class View(Index):
    """A model and its index. `View.of` builds it in O(nodes + uses).

    Attributes:
        opsets: opset versions by domain.
        ops: all ops, in topological order across scopes; an op's id is its position.
        values: all values; a value's id is its position.
        scopes: the main graph and the bodies.
        types: the type of each value.
        uses: the uses of each value.
        carried: pairs (output, input) of values that a body carries from one iteration to the next.
        names: all names of values and nodes, including in functions. New names must differ from all of these.
        model: the model, with its nodes in topological order.

    Example:
        >>> from amp_rewrite import Model, View
        >>> [op.op_type for op in View.of(Model.load("model.onnx")).ops][-1]
        'Softmax'
    """

    model: Model
    _results: dict[object, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Results of analyses decorated with `once`."""

    @classmethod
    def of(cls, model: Model) -> View:
        """Return the view of a model. Its `model` has the nodes in topological order.

        Raises:
            ModelError: the graph cannot run; the message names the node.
        """
        try:
            index = build(model.proto)
        except UnsortedError:
            ordered = in_order(model.proto)
            if ordered is None:
                raise
            note = "its nodes were not in topological order; they are sorted in the result"
            model = replace(model, proto=ordered, mends=(*model.mends, Finding("mended", "model", note)))
            index = build(ordered)
        return cls(**vars(index), model=model)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_results": {}}  # a copy computes its own

    def __repr__(self) -> str:
        return f"<View of {self.model!r}: {len(self.ops)} ops, {len(self.values)} values>"

    def dtype(self, value: ValueId | None) -> DType | None:
        """Return the element type of a value in any container; None if unknown or for an omitted input."""
        value_type = self.types[value] if value is not None else None
        return value_type.dtype if value_type else None

    def tensor_dtype(self, value: ValueId) -> DType | None:
        """Return the element type of a tensor; None if unknown or for a value in another container."""
        value_type = self.types[value]
        return value_type.dtype if value_type and value_type.container == TENSOR else None

    def holds_floats(self, value: ValueId) -> bool:
        """True for a floating-point tensor."""
        dtype = self.tensor_dtype(value)
        return dtype is not None and dtype.floating

    def owners(self, op: OpId) -> Iterator[OpId]:
        """Yield the ops whose bodies contain an op, innermost first."""
        owner = self.scopes[self.ops[op].scope].owner
        while owner is not None:
            yield owner
            owner = self.scopes[self.ops[owner].scope].owner

    @property
    def opset(self) -> int:
        """The opset version of ai.onnx; 1 if the model imports only other domains."""
        return self.opsets.get("", 1)

    @cached_property
    def low_types(self) -> tuple[DType, ...]:
        """The low types in the model, in order of their first values."""
        dtypes = dict.fromkeys(t.dtype for t in dict.fromkeys(self.types) if t is not None)
        return tuple(dtype for dtype in dtypes if dtype is not None and dtype.low)

    def value_name(self, value: ValueId) -> str:
        """Return the name of a value."""
        return self.values[value].name

    def readers(self, value: ValueId) -> Iterator[Op]:
        """Yield the readers of a value, once per use."""
        return (self.ops[use.op] for use in self.uses[value])

    def producer(self, value: ValueId | None, *kinds: str) -> Op | None:
        """Return the producer of a value; None for an input, an initializer, or a producer of another kind."""
        producer = self.values[value].producer if value is not None else None
        if producer is None:
            return None
        op = self.ops[producer]
        return op if not kinds or op.kind in kinds else None

    def of_kinds(self, kinds: Container[str]) -> Sequence[Op]:
        """Return the ops of these kinds, in order. O(ops of these kinds)."""
        chosen = [ops for kind, ops in self.by_kind.items() if kind in kinds]
        return sorted([op for ops in chosen for op in ops], key=attrgetter("id")) if len(chosen) != 1 else chosen[0]

    @cached_property
    def by_kind(self) -> Mapping[str, Sequence[Op]]:
        """The ops of each kind, in order."""
        ops: dict[str, list[Op]] = {}
        for op in self.ops:
            ops.setdefault(op.kind, []).append(op)
        return ops

    def constant(self, value: ValueId | None) -> TensorProto | None:
        """Return the tensor of a constant value: a fixed initializer, or the output of a Constant."""
        if value is None or self.values[value].overridable:
            return None
        return self.values[value].tensor

    @cached_property
    def constants(self) -> Mapping[ValueId, TensorProto]:
        """The tensors of all constant values, in order."""
        return {v.id: v.tensor for v in self.values if v.tensor is not None and not v.overridable}

    def copied(self, value: ValueId | None) -> TensorProto | None:
        """Return the tensor of a constant or of its copy through Identities; it must not be changed."""
        return self.constant(value) or (self._copies.get(value) if value is not None else None)

    @cached_property
    def _copies(self) -> Mapping[ValueId, TensorProto]:
        tensors: dict[ValueId, TensorProto] = {}
        for op in self.of_kinds(("Identity",)):
            source, copy = op.inputs[0], op.outputs[0]
            tensor = tensors[source] if source in tensors else self.constant(source)
            if tensor is not None and copy is not None:
                tensors[copy] = tensor
        return tensors

    def array(self, value: ValueId | None, limit: int | None = None) -> Array | None:
        """Return the elements of a constant or its copy; None for other values and above `limit` elements."""
        tensor = self.copied(value)
        large = tensor is not None and limit is not None and math.prod(tensor.dims) > limit
        return None if tensor is None or large else self.model.array(tensor)

    @once
    def fit(self, value: ValueId, to: DType) -> Fit:
        """Return statistics of rounding a constant or its copy to a low type; Fit() for other values."""
        tensor = self.copied(value)
        return self.model.fit(tensor, to) if tensor is not None else Fit()

    @cached_property
    def values_of(self) -> tuple[tuple[Value, ...], ...]:
        """The values of each scope, in order."""
        values: tuple[list[Value], ...] = tuple([] for _ in self.scopes)
        for value in self.values:
            values[value.scope].append(value)
        return tuple(map(tuple, values))

    @cached_property
    def yielded(self) -> frozenset[ValueId]:
        """The outputs of all graphs and bodies."""
        return frozenset(v for scope in self.scopes for v in scope.outputs)

    @cached_property
    def variables(self) -> tuple[tuple[TypeVariable, ...], ...]:
        """The type variables of each op, in order of their first ports. Ops with bodies and unknown ops have none."""
        variables: list[tuple[TypeVariable, ...]] = []
        for op in self.ops:
            ports: Sequence[tuple[str, tuple[int, ...], tuple[int, ...]]] = ()
            if op.signature is not None and not op.bodies:
                omitted = tuple([v is None for v in op.inputs]), tuple([v is None for v in op.outputs])
                ports = _ports(op.signature, *omitted)
            variables.append(tuple([TypeVariable(op.id, name, a, b, self._type_at(op, a, b)) for name, a, b in ports]))
        return tuple(variables)

    def _type_at(self, op: Op, ins: tuple[int, ...], outs: tuple[int, ...]) -> ValueType | None:
        """Return the type at these ports; the type of a tensor if a linked variable has tensors and sequences.

        None if an input's type is unknown, for example because an unknown op produces it: the input must not be cast.
        """
        types = [self.types[value] for slot in ins if (value := op.inputs[slot]) is not None]
        if any(map(unknown, types)):
            return None
        types += [self.types[value] for slot in outs if (value := op.outputs[slot]) is not None]
        return next((t for t in types if t is not None and t.container == TENSOR), types[0] if types else None)

    def forget(self) -> None:
        """Free the memory of the graph and of cached analyses, which are computed again when needed."""
        self._results.clear()
        for name in ("flow", "graph"):
            self.__dict__.pop(name, None)

    @cached_property
    def graph(self) -> nx.MultiDiGraph[OpId]:
        """The ops as a networkx graph, including the bodies of If, Loop and Scan.

        The nodes are op ids; their scopes and types are in `ops` and `variables`. An edge leads from the producer of a
        value to each reader, including captures, and from the producer of a body's output to the op with the body. Its
        key is the value with the reader's slot, which is None for a body's output. Edges from one iteration to the next
        are marked `carried`. O(nodes + uses).
        """
        graph: nx.MultiDiGraph[OpId] = nx.MultiDiGraph()
        with gc_paused():  # 0.5 s instead of 1.5 s for 100,000 edges
            graph.add_nodes_from(range(len(self.ops)))
            for op in self.ops:
                inner = ((None, out) for body in op.bodies for out in self.scopes[body].outputs)
                for slot, value in (*enumerate(op.inputs), *inner):
                    if value is not None and (producer := self.values[value].producer) is not None:
                        graph.add_edge(producer, op.id, (value, slot))
            for out, into in self.carried:
                if (producer := self.values[out].producer) is not None:
                    for use in self.uses[into]:
                        graph.add_edge(producer, use.op, (out, use.slot), carried=True)
        return graph

    @cached_property
    def flow(self) -> nx.MultiDiGraph[OpId]:
        """The `graph` without carried edges, which is acyclic."""
        graph = self.graph
        if not self.carried:
            return graph
        return nx.subgraph_view(graph, filter_edge=lambda *edge: "carried" not in graph.edges[edge])

    def after(self, starts: Iterable[OpId]) -> set[OpId]:
        """Return these ops and all ops that depend on them."""
        return set(chain.from_iterable(nx.bfs_layers(self.flow, list(starts))))

    def before(self, ends: Iterable[OpId]) -> set[OpId]:
        """Return these ops and all their dependencies."""
        return set(chain.from_iterable(nx.bfs_layers(self.flow.reverse(copy=False), list(ends))))


@lru_cache(maxsize=1 << 12)  # most ops of a model have the same ports as others
def _ports(
    schema: Signature, no_input: tuple[bool, ...], no_output: tuple[bool, ...]
) -> tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]:
    """Return the type variables of an op, with their inputs and outputs. True marks an omitted port."""
    variables: dict[str, tuple[list[int], list[int]]] = {}
    for side, (absent, variable) in enumerate(((no_input, schema.input_variable), (no_output, schema.output_variable))):
        for slot, omitted in enumerate(absent):
            if not omitted and (name := variable(slot)) is not None:
                variables.setdefault(name, ([], []))[side].append(slot)
    return tuple((name, tuple(ins), tuple(outs)) for name, (ins, outs) in variables.items())


def in_order(proto: ModelProto) -> ModelProto | None:
    """Return a copy of a model with its nodes in topological order; None if it has a cycle.

    Nodes keep their order as far as possible. O(nodes · log nodes).
    """
    ordered = clone(proto)
    bodies_of_functions = (body for f in ordered.functions for node in f.node for _, body in bodies(node))
    for holder in chain(ordered.functions, *map(all_graphs, (ordered.graph, *bodies_of_functions))):
        producers = {name: at for at, node in enumerate(holder.node) for name in node.output if name}
        graph: nx.DiGraph[int] = nx.DiGraph()
        graph.add_nodes_from(range(len(holder.node)))
        for at, node in enumerate(holder.node):
            graph.add_edges_from((producers[name], at) for name in _names_read(node) if name in producers)
        try:
            nodes = [holder.node[at] for at in nx.lexicographical_topological_sort(graph)]
        except nx.NetworkXUnfeasible:
            return None
        refill(holder, "node", nodes)
    return ordered


def _names_read(node: NodeProto) -> set[str]:
    names = set(filter(None, node.input))
    for _, body in bodies(node):
        inside = {formal.name for formal in body.output}.union(*map(_names_read, body.node))
        local = {named.name for named in (*body.input, *body.initializer)}
        local.update(sparse.values.name for sparse in body.sparse_initializer)
        names |= inside - local.union(*(inner.output for inner in body.node))
    return names
