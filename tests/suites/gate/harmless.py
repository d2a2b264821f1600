"""Rewrites without a change of precision, which the CI gate must accept.

A rewrite takes a copy of a model and a seeded random generator, and changes the copy in place or returns another model.
It returns None if it does not apply to the model.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence

import onnx
import onnx.inliner
import onnx.parser
import onnx.printer
import onnx.shape_inference
import onnx.version_converter
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper

from amp_rewrite.files.protos import all_graphs, all_nodes, clone

Rewrite = Callable[[ModelProto, random.Random], ModelProto | None]
REWRITES: dict[str, Rewrite] = {}


def rewrite(function: Rewrite) -> Rewrite:
    REWRITES[function.__name__] = function
    return function


def fresh(model: ModelProto, stem: str) -> Callable[[], str]:
    """Return a generator of names that are not in the model."""
    taken = {name for graph in all_graphs(model.graph) for name in names_in(graph)}
    count = iter(range(10**9))
    return lambda: next(name for number in count if (name := f"{stem}_{number}") not in taken)


def names_in(graph: GraphProto) -> Iterator[str]:
    for node in graph.node:
        yield from (node.name, *node.input, *node.output)
    for formal in (*graph.input, *graph.output, *graph.value_info, *graph.initializer):
        yield formal.name


def renamed(model: ModelProto, new: Callable[[str], str]) -> ModelProto:
    """Rename values in all graphs. Equal names stay equal, because a body may reuse an outer name."""
    for graph in all_graphs(model.graph):
        for formal in (*graph.input, *graph.output, *graph.value_info, *graph.initializer):
            formal.name = new(formal.name)
        for sparse in graph.sparse_initializer:
            sparse.values.name = new(sparse.values.name)
        for node in graph.node:
            for side in (node.input, node.output):
                side[:] = [new(name) if name else "" for name in side]
    return model


def interface(model: ModelProto) -> set[str]:
    return {formal.name for formal in (*model.graph.input, *model.graph.output)}


def replace(graph: GraphProto, nodes: Iterable[NodeProto]) -> None:
    copies = list(nodes)
    del graph.node[:]
    graph.node.extend(copies)


# -- names ---------------------------------------------------------------------------------------------


def nodes_are_renamed(model: ModelProto, rng: random.Random) -> ModelProto:
    for number, node in enumerate(all_nodes(model.graph.node)):
        node.name = f"op_{rng.randrange(10**6)}_{number}"
    return model


@rewrite
def nodes_lose_their_names(model: ModelProto, _: random.Random) -> ModelProto:
    for node in all_nodes(model.graph.node):
        node.name = ""
    return model


@rewrite
def all_values_and_nodes_are_renamed(model: ModelProto, rng: random.Random) -> ModelProto:
    return renamed(nodes_are_renamed(model, rng) or model, lambda name: f"all/{name}")


@rewrite
def weights_get_numbers_that_shift(model: ModelProto, _: random.Random) -> ModelProto | None:
    weights = [tensor.name for tensor in model.graph.initializer if tensor.name not in interface(model)]
    if not weights:
        return None
    shifted = dict(zip(weights, [*weights[1:], "the_last"], strict=True))
    return renamed(model, lambda name: shifted.get(name, name))


# -- order ---------------------------------------------------------------------------------------------


def reordered(graph: GraphProto, pick: Callable[[Sequence[int]], int]) -> None:
    """Sort the nodes of a graph in a different topological order."""
    nodes = list(graph.node)
    producers = {name: i for i, node in enumerate(nodes) for name in node.output if name}
    needs = [{producers[name] for name in reads(node) if name in producers} for node in nodes]
    waiting, order = set(range(len(nodes))), list[int]()
    while waiting:
        ready = sorted(i for i in waiting if not needs[i] & waiting)
        order.append(pick(ready))
        waiting.discard(order[-1])
    replace(graph, [nodes[i] for i in order])


def reads(node: NodeProto) -> set[str]:
    inner = {name for _, body in bodies_of(node) for n in all_nodes(body.node) for name in n.input}
    return {*node.input, *inner, *(o.name for _, body in bodies_of(node) for o in body.output)}


def bodies_of(node: NodeProto) -> Iterator[tuple[str, GraphProto]]:
    for a in node.attribute:
        if a.type == AttributeProto.GRAPH:
            yield a.name, a.g


@rewrite
def all_is_renamed_and_reordered(model: ModelProto, rng: random.Random) -> ModelProto | None:
    out = all_values_and_nodes_are_renamed(model, rng) or model
    reordered(out.graph, rng.choice)
    return out


# -- constants -------------------------------------------------------------------------------------------


@rewrite
def weights_become_constant_nodes(model: ModelProto, _: random.Random) -> ModelProto | None:
    public = interface(model)
    moved = [tensor for tensor in model.graph.initializer if tensor.name not in public]
    others = [tensor for tensor in model.graph.initializer if tensor.name in public]
    nodes = [helper.make_node("Constant", [], [tensor.name], value=tensor) for tensor in moved]
    del model.graph.initializer[:]
    model.graph.initializer.extend(others)
    replace(model.graph, [*nodes, *model.graph.node])
    return model if moved else None


@rewrite
def each_reader_gets_its_own_constant(model: ModelProto, _: random.Random) -> ModelProto | None:
    weights, name = {tensor.name: tensor for tensor in model.graph.initializer}, fresh(model, "copy")
    seen: set[str] = set()
    copies = []
    for node in model.graph.node:
        for slot, read in enumerate(node.input):
            if read in weights and read in seen:
                copy = clone(weights[read])
                copy.name = node.input[slot] = name()
                copies.append(copy)
            seen.add(read)
    model.graph.initializer.extend(copies)
    return model if copies else None


# -- copies and dead code --------------------------------------------------------------------------------


def edges(graph: GraphProto) -> list[tuple[NodeProto, int]]:
    """Return the inputs that are results of nodes in the same graph."""
    results = {name for node in graph.node for name in node.output}
    return [(node, slot) for node in graph.node for slot, name in enumerate(node.input) if name in results]


def put_before(graph: GraphProto, node: NodeProto, *new: NodeProto) -> None:
    at = next(i for i, other in enumerate(graph.node) if other is node or other.output[:] == node.output[:])
    nodes = list(graph.node)
    replace(graph, [*nodes[:at], *new, *nodes[at:]])


def through(model: ModelProto, rng: random.Random, make: Callable[[str, str], list[NodeProto]], share: float) -> bool:
    """Insert nodes into some edges of the main graph."""
    graph, name = model.graph, fresh(model, "through")
    chosen = [(list(node.output), slot) for node, slot in edges(graph) if rng.random() < share]
    for output, slot in chosen:
        node = next(n for n in graph.node if list(n.output) == output)
        passed = name()
        inserted = make(node.input[slot], passed)
        node.input[slot] = passed
        put_before(graph, node, *inserted)
    return bool(chosen)


@rewrite
def identities_are_inserted_into_most_edges(model: ModelProto, rng: random.Random) -> ModelProto | None:
    return model if through(model, rng, lambda a, b: [helper.make_node("Identity", [a], [b], name=b)], 0.8) else None


@rewrite
def casts_without_effect_are_inserted_into_edges(model: ModelProto, rng: random.Random) -> ModelProto | None:
    types = element_types(model)

    def cast(a: str, b: str) -> list[NodeProto]:
        if a not in types:
            return [helper.make_node("Identity", [a], [b])]
        return [helper.make_node("Cast", [a], [b], to=types[a])]

    return model if through(model, rng, cast, 0.3) else None


def element_types(model: ModelProto) -> dict[str, int]:
    """Return this package's inferred element types of tensors in the main graph."""
    from amp_rewrite.files.model import Model
    from amp_rewrite.ir.view import MAIN, View

    view = View.of(Model.load(model))
    known = ((v.name, view.types[v.id]) for v in view.values if v.scope == MAIN)
    return {
        name: t.dtype.code for name, t in known if t is not None and t.dtype is not None and t.container == "tensor"
    }


def float_results(model: ModelProto) -> list[str]:
    types = element_types(model)
    results = [name for node in model.graph.node for name in node.output]
    return [name for name in results if types.get(name) == TensorProto.FLOAT]


@rewrite
def some_values_get_dead_readers(model: ModelProto, rng: random.Random) -> ModelProto | None:
    values = float_results(model)
    for number, value in enumerate(rng.sample(values, min(len(values), 5))):
        model.graph.node.extend(
            (
                helper.make_node("Cast", [value], [f"dead_{number}"], to=TensorProto.FLOAT16),
                helper.make_node("Exp", [f"dead_{number}"], [f"deader_{number}"]),
                helper.make_node("Cast", [f"deader_{number}"], [f"deadest_{number}"], to=TensorProto.FLOAT),
            )
        )
    return model if values else None


# -- functions ---------------------------------------------------------------------------------------------


@rewrite
def functions_are_inlined(model: ModelProto, _: random.Random) -> ModelProto | None:
    return onnx.inliner.inline_local_functions(model) if model.functions else None


# -- declarations --------------------------------------------------------------------------------------------


@rewrite
def defaults_are_stated(model: ModelProto, _: random.Random) -> ModelProto:
    opset = next(o.version for o in model.opset_import if not o.domain)
    for node in all_nodes(model.graph.node):
        if node.domain:
            continue
        present = {a.name for a in node.attribute}
        for name, a in onnx.defs.get_schema(node.op_type, opset, "").attributes.items():
            if name not in present and a.default_value.type:
                node.attribute.append(a.default_value)
    return model


@rewrite
def optional_inputs_are_left_out_at_the_end(model: ModelProto, _: random.Random) -> ModelProto | None:
    opset = next(o.version for o in model.opset_import if not o.domain)
    changed = False
    for node in all_nodes(model.graph.node):
        if node.domain:
            continue
        formals = onnx.defs.get_schema(node.op_type, opset, "").inputs
        if node.input and len(node.input) < len(formals) and formals[len(node.input)].option.name == "Optional":
            node.input.append("")
            changed = True
    return model if changed else None


# -- equivalent spellings ----------------------------------------------------------------------------------------

SAME_SHAPES = frozenset({"Softmax", "LogSoftmax", "LayerNormalization"})


@rewrite
def axes_count_from_the_front(model: ModelProto, _: random.Random) -> ModelProto | None:
    inferred = onnx.shape_inference.infer_shapes(model)
    ranks = {
        f.name: len(f.type.tensor_type.shape.dim)
        for f in inferred.graph.value_info
        if f.type.tensor_type.HasField("shape")
    }
    changed = False
    for node in model.graph.node:
        for a in node.attribute:
            if a.name == "axis" and a.i < 0 and node.op_type in SAME_SHAPES and node.input[0] in ranks:
                a.i += ranks[node.input[0]]
                changed = True
    return model if changed else None


@rewrite
def kernel_shapes_follow_from_weights(model: ModelProto, _: random.Random) -> ModelProto | None:
    changed = False
    for node in model.graph.node:
        others = [a for a in node.attribute if a.name != "kernel_shape"]
        if node.op_type == "Conv" and len(others) < len(node.attribute):
            del node.attribute[:]
            node.attribute.extend(others)
            changed = True
    return model if changed else None


def upgraded(opset: int) -> Rewrite:
    def upgrade(model: ModelProto, _: random.Random) -> ModelProto | None:
        current = next(o.version for o in model.opset_import if not o.domain)
        if current >= opset:
            return None
        before = [node.op_type for node in all_nodes(model.graph.node)]
        try:
            newer = onnx.version_converter.convert_version(model, opset)
        except (RuntimeError, onnx.version_converter.ConvertError):
            return None
        after = [node.op_type for node in all_nodes(newer.graph.node) if node.op_type != "Constant"]
        same = after == [op for op in before if op != "Constant"]  # it may also write other ops and lose functions
        return newer if same and len(newer.functions) == len(model.functions) else None

    upgrade.__name__ = f"opset_{opset}"
    return upgrade


for _opset in (18, 20, 22):
    REWRITES[f"the_opset_is_{_opset}"] = upgraded(_opset)


# -- operands, bodies and ports ------------------------------------------------------------------------


def operands_that_commute_change_places(model: ModelProto, rng: random.Random) -> ModelProto | None:
    nodes = [node for node in all_nodes(model.graph.node) if node.op_type in ("Add", "Mul", "Max", "Min", "Sum")]
    for node in nodes:
        if rng.random() < 0.6:
            node.input[:] = list(node.input)[::-1]
    return model if nodes else None


@rewrite
def operands_change_places_and_all_is_renamed_and_reordered(model: ModelProto, rng: random.Random) -> ModelProto | None:
    changed = operands_that_commute_change_places(model, rng)
    return all_is_renamed_and_reordered(changed, rng) if changed is not None else None


@rewrite
def bodies_are_reordered(model: ModelProto, _: random.Random) -> ModelProto | None:
    several = [node for node in all_nodes(model.graph.node) if len(list(bodies_of(node))) > 1]
    for node in several:
        attributes = list(node.attribute)[::-1]
        del node.attribute[:]
        node.attribute.extend(attributes)
    return model if several else None


@rewrite
def weights_move_into_the_bodies_of_their_readers(model: ModelProto, _: random.Random) -> ModelProto | None:
    weights = {tensor.name: tensor for tensor in model.graph.initializer if tensor.name not in interface(model)}
    count = 0
    for graph in list(all_graphs(model.graph))[1:]:
        for name in dict.fromkeys(name for node in graph.node for name in node.input if name in weights):
            copy = clone(weights[name])
            copy.name, count = f"{name}_inside_{count}", count + 1
            graph.initializer.append(copy)
            for node in graph.node:
                node.input[:] = [copy.name if read == name else read for read in node.input]
    return model if count else None


@rewrite
def bodies_get_identities_and_dead_code(model: ModelProto, rng: random.Random) -> ModelProto | None:
    name, graphs = fresh(model, "inside"), list(all_graphs(model.graph))[1:]
    for graph in graphs:
        nodes = list[NodeProto]()
        for node in graph.node:
            for slot, read in enumerate(node.input):
                if read and rng.random() < 0.5:
                    node.input[slot] = name()
                    nodes.append(helper.make_node("Identity", [read], [node.input[slot]]))
            nodes.append(node)
        for formal in graph.output:
            nodes.append(helper.make_node("Identity", [formal.name], [name()]))
            formal.name = nodes[-1].output[0]
        nodes.append(helper.make_node("Cast", [formal.name], [name()], to=TensorProto.FLOAT16))
        replace(graph, nodes)
    return model if graphs else None


@rewrite
def inputs_and_outputs_are_reordered(model: ModelProto, _: random.Random) -> ModelProto | None:
    if max(len(model.graph.input), len(model.graph.output)) < 2:
        return None
    for ports in (model.graph.input, model.graph.output):
        ports_reversed = list(ports)[::-1]
        del ports[:]
        ports.extend(ports_reversed)
    return model


@rewrite
def attributes_are_defaults_of_functions(model: ModelProto, _: random.Random) -> ModelProto | None:
    opset, before = next(o for o in model.opset_import if not o.domain), len(model.functions)
    for number, node in enumerate(model.graph.node):
        if node.op_type not in ("Cast", "Concat", "Gemm", "LayerNormalization", "Softmax", "Transpose"):
            continue
        inner = NodeProto(op_type=node.op_type)
        inner.input.extend(f"i{slot}" for slot, _ in enumerate(node.input))
        inner.output.extend(f"o{slot}" for slot, _ in enumerate(node.output))
        function = helper.make_function("defaults", f"F{number}", inner.input, inner.output, [inner], [opset])
        for a in node.attribute:
            function.node[0].attribute.add(name=a.name, type=a.type, ref_attr_name=a.name)
            function.attribute_proto.add().CopyFrom(a)
        model.functions.append(function)
        node.domain, node.op_type = "defaults", function.name
        del node.attribute[:]
    model.opset_import.append(helper.make_opsetid("defaults", 1))
    return model if len(model.functions) > before else None


@rewrite
def names_of_similar_nodes_are_shuffled(model: ModelProto, rng: random.Random) -> ModelProto:
    for kind in sorted({node.op_type for node in model.graph.node}):
        nodes = [node for node in model.graph.node if node.op_type == kind]
        names = [node.name for node in nodes]
        rng.shuffle(names)
        for node, name in zip(nodes, names, strict=True):
            node.name = name
    return model
