"""Access to the attributes of nodes."""

from __future__ import annotations

from collections.abc import Sequence

from onnx import AttributeProto, NodeProto


def attribute(node: NodeProto, name: str) -> AttributeProto | None:
    return next((a for a in node.attribute[:] if a.name == name), None)  # iterating over a slice is twice as fast


def float_attribute(node: NodeProto, name: str, default: float) -> float:
    found = attribute(node, name)
    return default if found is None else found.f


def int_attribute(node: NodeProto, name: str, default: int) -> int:
    found = attribute(node, name)
    return default if found is None else found.i


def text_attribute(node: NodeProto, name: str, default: str = "") -> str:
    found = attribute(node, name)
    return default if found is None else found.s.decode("utf-8", "replace")


def ints_attribute(node: NodeProto, name: str) -> tuple[int, ...]:
    found = attribute(node, name)
    return () if found is None else tuple(found.ints)


def equation(node: NodeProto) -> tuple[Sequence[str], str]:
    """Return the labels of each operand of an Einsum, and the explicit or implied labels of the result."""
    operands, arrow, result = text_attribute(node, "equation").replace(" ", "").partition("->")
    if not arrow:
        labels = operands.replace(",", "").replace("...", "")
        result = "..." * ("..." in operands) + "".join(sorted(x for x in set(labels) if labels.count(x) == 1))
    return operands.split(","), result
