"""Changes to a model that byte flips would not find: each keeps it a protobuf and breaks what it means."""

from __future__ import annotations

import random
from collections.abc import Callable

import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto

from support.objections import graphs

OP_TYPES = tuple(sorted({schema.name for schema in onnx.defs.get_all_schemas()}))
DOMAINS = ("", "ai.onnx", "com.microsoft", "ai.onnx.ml", "local", "\x1b[31m", "a" * 300)
NAMES = ("", "x", "y", "\n", "\x1b[2J", "\u202eevil", "a/b", "..", "%", "::error::", "\0", "é" * 50)
NUMBERS = (-(2**63), -(2**31), -1, 0, 1, 2, 7, 99, 2**31, 2**40, 10**12, 2**63 - 1)

Mutation = Callable[[ModelProto, random.Random], None]


def mutated(content: bytes, rng: random.Random, changes: int = 3) -> bytes:
    """The model with some changes; bytes that are no model come back with some bytes changed."""
    proto = ModelProto()
    try:
        proto.ParseFromString(content)
    except onnx.checker.ValidationError:
        raise
    except Exception:  # noqa: BLE001  whatever protobuf says of it, it is no model
        return damaged(content, rng)
    for _ in range(rng.randint(1, changes)):
        rng.choice(MUTATIONS)(proto, rng)
    out = proto.SerializeToString()
    return damaged(out, rng) if rng.random() < 0.1 else out


def spelled_out() -> list[bytes]:
    """Sound models of what is recognized in models: attention, norms and GELUs op by op, masks."""
    from support import attention_models as attention
    from support import contrib_models as contrib
    from support import fuse_models as fuse

    masked = (
        ("m = Add (z, mask)  ", ", float[2,1,3,5] mask"),
        (attention.SUMMED + "m = Add (z, b)  ", attention.MASK),
        *((body, ", int64[2,1,3,5] ids") for body in (attention.OLD, attention.INVERTED, attention.TESTED)),
    )
    found = [attention.model_of(attention.PLAIN)]
    for body, more in masked:
        for opset in (17, 23):
            found.append(attention.model_of(attention.SCORES + body + attention.WEIGHTS, more, opset))
    for body in (fuse.LAYER_NORM + "y = Mul (n, gain)", fuse.RMS_NORM, fuse.ERF, fuse.TANH):
        found += [fuse.model_of(body), fuse.model_of(body, opset=12)]
    found.append(fuse.model_of(fuse.SOFTMAX))
    whole = contrib.SPLIT + contrib.SCORES + contrib.SOFTMAX + contrib.REST + contrib.MERGED
    hidden = contrib.SPLIT + contrib.HIDDEN + contrib.SOFTMAX + contrib.REST + contrib.MERGED
    found += [contrib.attention_of(whole), contrib.attention_of(hidden, contrib.MASKED)]
    found += [contrib.model_of("t = Add (x, z)  " + contrib.LAYER_NORM)]
    return [model.SerializeToString() for model in found]


def arrays(names: list[str]) -> bytes:
    """A .npz file of a small array under each name."""
    import io

    import numpy as np

    held = {name: np.arange(8, dtype=np.float32).reshape(2, 4) for name in names}
    made = io.BytesIO()
    np.savez(made, **held)  # type: ignore[arg-type]
    return made.getvalue()


def damaged(content: bytes, rng: random.Random) -> bytes:
    """The bytes with some flipped, cut out, doubled or cut off."""
    out = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        if not out:
            return bytes(out)
        at = rng.randrange(len(out))
        way = rng.randrange(4)
        if way == 0:
            out[at] ^= 1 << rng.randrange(8)
        elif way == 1:
            out[at] = rng.choice((0, 0x7F, 0x80, 0xFF))
        elif way == 2:
            del out[at : at + rng.randint(1, 32)]
        else:
            out[at:at] = out[at : at + rng.randint(1, 64)]
    return bytes(out)


def _graph(proto: ModelProto, rng: random.Random) -> GraphProto:
    return rng.choice(list(graphs(proto.graph)))


def _node(proto: ModelProto, rng: random.Random) -> NodeProto:
    graph = _graph(proto, rng)
    if not graph.node:
        graph.node.add(op_type="Relu", input=["x"], output=["y"])
    return rng.choice(graph.node)


def _tensors(proto: ModelProto) -> list[TensorProto]:
    found = [tensor for graph in graphs(proto.graph) for tensor in graph.initializer]
    found += [a.t for graph in graphs(proto.graph) for node in graph.node for a in node.attribute if a.HasField("t")]
    return found


def _names(proto: ModelProto) -> list[str]:
    found = [name for graph in graphs(proto.graph) for node in graph.node for name in (*node.input, *node.output)]
    return [name for name in found if isinstance(name, str)] or ["x"]


def _change_op(proto: ModelProto, rng: random.Random) -> None:
    _node(proto, rng).op_type = rng.choice(OP_TYPES) if rng.random() < 0.9 else ""


def _rename(proto: ModelProto, rng: random.Random) -> None:
    node = _node(proto, rng)
    if rng.random() < 0.5:
        node.domain = rng.choice(DOMAINS)
    else:
        node.name = rng.choice(NAMES)


def _rewire(proto: ModelProto, rng: random.Random) -> None:
    node = _node(proto, rng)
    ports = rng.choice((node.input, node.output))
    name = rng.choice((*_names(proto)[:500], *NAMES))
    if ports and rng.random() < 0.7:
        ports[rng.randrange(len(ports))] = name
    else:
        ports.append(name)


def _drop_ports(proto: ModelProto, rng: random.Random) -> None:
    node = _node(proto, rng)
    ports = rng.choice((node.input, node.output))
    if ports:
        del ports[rng.randrange(len(ports)) :]


def _drop(proto: ModelProto, rng: random.Random) -> None:
    graph, node = _graph(proto, rng), _node(proto, rng)
    items = rng.choice((graph.node, graph.input, graph.output, graph.initializer, node.attribute))
    if items:
        del items[rng.randrange(len(items))]


def _double_node(proto: ModelProto, rng: random.Random) -> None:
    graph = _graph(proto, rng)
    if graph.node:
        graph.node.add().CopyFrom(rng.choice(graph.node))


def _attribute(proto: ModelProto, rng: random.Random) -> AttributeProto:
    nodes = [node for graph in graphs(proto.graph) for node in graph.node if node.attribute]
    return rng.choice(rng.choice(nodes).attribute) if nodes else _node(proto, rng).attribute.add(name="axis")


def _change_attribute(proto: ModelProto, rng: random.Random) -> None:
    attribute = _attribute(proto, rng)
    way = rng.randrange(7)
    if way == 0:
        attribute.type = rng.choice(AttributeProto.AttributeType.values())
    elif way == 1:
        attribute.i = rng.choice(NUMBERS)
    elif way == 2:
        attribute.s = rng.choice((b"", b"\xff\xfe", b"FLOAT", b"nonsense", b"a" * 1000))
    elif way == 3:
        attribute.ints.append(rng.choice(NUMBERS))
    elif way == 4:
        name = attribute.name
        attribute.Clear()
        attribute.name = name if isinstance(name, str) else ""  # protobuf gives bytes for what is not UTF-8
    elif way == 5:
        attribute.name = rng.choice(("to", "axis", "body", "value", "dtype", "num_scan_inputs", "perm", ""))
    else:
        attribute.ref_attr_name = rng.choice(("alpha", ""))


def _add_attribute(proto: ModelProto, rng: random.Random) -> None:
    source = AttributeProto()
    source.CopyFrom(_attribute(proto, rng))
    _node(proto, rng).attribute.add().CopyFrom(source)


def _change_tensor(proto: ModelProto, rng: random.Random) -> None:
    tensors = _tensors(proto)
    tensor = rng.choice(tensors) if tensors else proto.graph.initializer.add(name="w", data_type=1)
    way = rng.randrange(6)
    if way == 0:
        tensor.dims.append(rng.choice(NUMBERS))
    elif way == 1 and tensor.dims:
        tensor.dims[rng.randrange(len(tensor.dims))] = rng.choice(NUMBERS)
    elif way == 2:
        tensor.data_type = rng.choice((*range(30), 10**6, -1))
    elif way == 3:
        tensor.raw_data = rng.randbytes(rng.randrange(20))
    elif way == 4:
        tensor.float_data.extend([float("nan"), 1e30])
    else:
        tensor.data_location = TensorProto.EXTERNAL
        for key in ("location", "offset", "length"):
            if rng.random() < 0.8:
                tensor.external_data.add(
                    key=key, value=rng.choice(("..", "/etc/passwd", "m.onnx", "-1", "0", "9" * 30))
                )


def _change_opset(proto: ModelProto, rng: random.Random) -> None:
    if proto.opset_import and rng.random() < 0.7:
        rng.choice(proto.opset_import).version = rng.choice((*range(30), *NUMBERS))
    elif rng.random() < 0.5:
        proto.opset_import.add(domain=rng.choice(DOMAINS), version=rng.choice((0, 1, 10**6)))
    else:
        proto.ir_version = rng.choice(NUMBERS)


def _change_value(proto: ModelProto, rng: random.Random) -> None:
    graph = _graph(proto, rng)
    values = [*graph.input, *graph.output, *graph.value_info]
    value = rng.choice(values) if values else graph.output.add(name="y")
    way = rng.randrange(6)
    if way == 0:
        value.type.tensor_type.elem_type = rng.choice((*range(30), 10**6))
    elif way == 1:
        value.type.sequence_type.elem_type.tensor_type.elem_type = rng.choice(range(25))
    elif way == 2:
        value.type.optional_type.elem_type.sequence_type.elem_type.tensor_type.elem_type = 1
    elif way == 3:
        value.ClearField("type")
    elif way == 4:
        value.name = rng.choice((*_names(proto)[:500], *NAMES))
    else:
        value.type.tensor_type.shape.dim.add(dim_value=rng.choice(NUMBERS))


def _add_body(proto: ModelProto, rng: random.Random) -> None:
    body = GraphProto()
    body.CopyFrom(_graph(proto, rng))
    if body.ByteSize() > 20_000:
        return
    node = _node(proto, rng)
    node.op_type = rng.choice(("If", "Loop", "Scan", "SequenceMap", "Relu"))
    name = rng.choice(("body", "then_branch", "else_branch"))
    node.attribute.add(name=name, type=AttributeProto.GRAPH).g.CopyFrom(body)


def _add_function(proto: ModelProto, rng: random.Random) -> None:
    function = proto.functions.add(domain="local", name=rng.choice(("f", "g")))
    function.input.append("x")
    function.output.append("y")
    function.opset_import.add(domain="", version=rng.choice((0, 13, 21)))
    function.opset_import.add(domain="local", version=1)
    domain, op_type = rng.choice((("local", "f"), ("local", "g"), ("", "Relu")))
    function.node.add(domain=domain, op_type=op_type, input=["x"], output=["y"])
    node = _node(proto, rng)
    node.domain, node.op_type = "local", function.name
    if rng.random() < 0.8:
        proto.opset_import.add(domain="local", version=1)


MUTATIONS: tuple[Mutation, ...] = (
    _change_op,
    _rename,
    _rewire,
    _drop_ports,
    _drop,
    _double_node,
    _change_attribute,
    _add_attribute,
    _change_tensor,
    _change_opset,
    _change_value,
    _add_body,
    _add_function,
)
