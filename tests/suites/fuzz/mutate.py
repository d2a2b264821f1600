"""Structural changes to a model: the result is still a protobuf but with another meaning."""

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import onnx
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from onnx import ModelProto

OP_TYPES = tuple(sorted({schema.name for schema in onnx.defs.get_all_schemas()}))
DOMAINS = ("", "ai.onnx", "com.microsoft", "ai.onnx.ml", "local", "\x1b[31m", "a" * 300)
NAMES = (
    "",
    "x",
    "axis",
    "body",
    "m.onnx",
    "\n",
    "\x1b[2J",
    "\u202eevil",
    "a/b",
    "..",
    "%",
    "::error::",
    "\0",
    "é" * 50,
)
NUMBERS = (-(2**63), -(2**31), -1, 0, 1, 2, 7, 99, 2**31, 2**40, 10**12, 2**63 - 1)


def mutated(content: bytes, rng: random.Random) -> bytes:
    """Change a model in some places, or some bytes of other content."""
    proto = ModelProto()
    try:
        proto.ParseFromString(content)
    except onnx.checker.ValidationError:
        raise
    except Exception:  # noqa: BLE001  any error of protobuf means that it is not a model
        return damaged(content, rng)
    for _ in range(rng.randint(1, 3)):
        change(proto, rng)
    out = proto.SerializeToString()
    return damaged(out, rng) if rng.random() < 0.1 else out


def spelled_out() -> list[bytes]:
    """Return valid models of recognized patterns: decomposed attention, norms and GELUs, masks."""
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
    """Return a .npz file with a small array under each name."""
    import io

    import numpy as np

    file = io.BytesIO()
    np.savez(file, **{name: np.arange(8, dtype=np.float32).reshape(2, 4) for name in names})  # type: ignore[arg-type]
    return file.getvalue()


def damaged(content: bytes, rng: random.Random) -> bytes:
    """Flip, overwrite, delete or repeat some bytes."""
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


# -- changes of messages ---------------------------------------------------------------------------------


def messages(message: Message) -> Iterator[Message]:
    """Yield a message and all inner messages."""
    yield message
    for field, value in message.ListFields():
        if field.message_type is not None:
            for inner in value if _repeated(message, field) else [value]:
                yield from messages(inner)


def _repeated(message: Message, field: FieldDescriptor) -> bool:
    return hasattr(getattr(message, field.name), "extend")


def change(proto: ModelProto, rng: random.Random) -> None:
    """Change one field of one message; all kinds of messages are equally likely."""
    by_kind: dict[str, list[Message]] = {}
    for message in messages(proto):
        by_kind.setdefault(message.DESCRIPTOR.name, []).append(message)
    message = rng.choice(by_kind[rng.choice(sorted(by_kind))])
    present = [field for field, _ in message.ListFields()]
    field = rng.choice(present if present and rng.random() < 0.7 else list(message.DESCRIPTOR.fields))
    if field.message_type is not None:
        _change_inner(message, field, by_kind.get(field.message_type.name, []), rng)
    elif _repeated(message, field):
        items, way = getattr(message, field.name), rng.randrange(4)
        if way == 0 or not items:
            items.append(_scalar(field, by_kind, rng))
        elif way == 1:
            del items[rng.randrange(len(items)) :]
        else:
            items[rng.randrange(len(items))] = _scalar(field, by_kind, rng)
    elif rng.random() < 0.2:
        message.ClearField(field.name)
    else:
        setattr(message, field.name, _scalar(field, by_kind, rng))


def _change_inner(message: Message, field: FieldDescriptor, others: Sequence[Message], rng: random.Random) -> None:
    """Remove a message from a field, or add or copy one there."""
    small = [other for other in others if other.ByteSize() < 20_000]
    copy = type(rng.choice(small)).FromString(rng.choice(small).SerializeToString()) if small else None
    if not _repeated(message, field):
        message.ClearField(field.name)
        if rng.random() < 0.7:
            target = getattr(message, field.name)
            target.SetInParent() if copy is None else target.CopyFrom(copy)
        return
    items = getattr(message, field.name)
    if items and rng.random() < 0.4:
        del items[rng.randrange(len(items))]
    elif copy is None:
        items.add()
    else:
        items.add().CopyFrom(copy)


def _scalar(field: FieldDescriptor, by_kind: Mapping[str, Sequence[Any]], rng: random.Random) -> Any:
    """Draw a value for a field: a valid one, one of this model, or an odd one."""
    if field.enum_type is not None:
        return rng.choice(field.enum_type.values).number
    if field.name in ("op_type", "domain"):
        return rng.choice(OP_TYPES if field.name == "op_type" and rng.random() < 0.9 else DOMAINS)
    if field.cpp_type == field.CPPTYPE_STRING:
        used = [name for node in by_kind.get("NodeProto", [])[:200] for name in (*node.input, *node.output)]
        name = rng.choice(used if used and rng.random() < 0.6 else NAMES)
        text = name if isinstance(name, str) else ""  # protobuf returns invalid UTF-8 as bytes
        return text.encode() if field.type == field.TYPE_BYTES else text
    if field.cpp_type in (field.CPPTYPE_FLOAT, field.CPPTYPE_DOUBLE):
        return rng.choice((0.0, -1.0, 1e30, float("nan"), float("inf")))
    number = rng.choice((*range(30), *NUMBERS))
    narrow = field.cpp_type in (field.CPPTYPE_INT32, field.CPPTYPE_UINT32)
    return number % 2**31 if narrow else abs(number) if field.cpp_type == field.CPPTYPE_UINT64 else number
