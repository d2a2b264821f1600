"""Convolutions of a step in blocks of channels, the layout in which onnxruntime computes on a CPU most quickly.

onnxruntime lays a convolution out so by itself where its weight is constant, which it is not in training. The operators
of that layout are its own, so each process asks once, by results, whether this onnxruntime and this CPU have them.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod

import numpy as np
import onnx.parser
from onnx import NodeProto

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import ModelError
from amp_rewrite.files.model import Model
from amp_rewrite.files.protos import clone, refill
from amp_rewrite.ir.attributes import int_attribute, ints_attribute, text_attribute
from amp_rewrite.ir.builder import NodeBuilder
from amp_rewrite.ir.nodes import MAIN
from amp_rewrite.rewrite.autodiff.facts import ModelFacts, known_dims
from amp_rewrite.runtime.runner import Runner, SessionOptions

_DOMAIN = "com.microsoft.nchwc"
_SIZES = (16, 8)
"""Channels of a block: of CPUs with AVX-512, and of others."""

CONVOLUTIONS = ("Conv", "ConvTranspose")


@cache
def channel_block() -> int:
    """Return how many channels a block of this CPU's kernels holds; 0 if they have no such layout."""
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    return next((size for size in _SIZES if _computes_in(size)), 0) if x86 else 0


def _computes_in(block: int) -> bool:
    """True if a convolution in blocks of this size is right; in blocks of another size it reads other channels."""
    shapes = {"x": (1, 2 * block, 3, 3), "w": (2 * block, 2 * block, 3, 3)}
    inputs = ", ".join(f"float[{','.join(map(str, shape))}] {name}" for name, shape in shapes.items())
    graph = f"convolution ({inputs}) => (float[1,{2 * block},1,1] y) {{ y = Conv(x, w) }}"
    plain = Model(onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 13]> {graph}'))
    random = np.random.default_rng(0)
    feeds = {name: random.random(shape, np.float32) for name, shape in shapes.items()}
    models = plain, in_channel_blocks(plain, block)
    try:
        y, other = (Runner.open(model, SessionOptions(threads=1)).run(feeds)["y"] for model in models)
    except ModelError:
        return False
    return np.allclose(np.asarray(y), np.asarray(other), rtol=1e-4)


@dataclass(frozen=True, slots=True)
class _Layout:
    """A Conv over two axes: the weight [results, channels, kernel…], turned if it is that of a ConvTranspose."""

    weight: tuple[int, ...]
    turned: bool
    strides: Sequence[int]
    dilations: Sequence[int]
    pads: Sequence[int]

    @classmethod
    def of(cls, node: NodeProto, weight: tuple[int, ...]) -> _Layout | None:
        """Return the layout of a convolution by windows; None for others, groups and padding that depends on dims."""
        strides, dilations = (ints_attribute(node, name) or (1, 1) for name in ("strides", "dilations"))
        pads = ints_attribute(node, "pads") or (0, 0, 0, 0)
        fixed = text_attribute(node, "auto_pad", "NOTSET") == "NOTSET" and int_attribute(node, "group", 1) == 1
        if len(weight) != 4 or prod(weight[2:]) == 1 or not fixed:
            return None
        if node.op_type == "Conv":
            return cls(weight, False, strides, dilations, pads)
        # without strides it is a Conv of the turned weight, padded by the rest of the window
        back = [(k - 1) * d - p for k, d, p in zip(weight[2:] * 2, (*dilations, *dilations), pads, strict=True)]
        plain = set(strides) == {1} and not any(ints_attribute(node, "output_padding")) and min(back) >= 0
        if not plain or ints_attribute(node, "output_shape"):
            return None
        return cls((weight[1], weight[0], *weight[2:]), True, strides, dilations, back)


def in_channel_blocks(model: Model, block: int | None = None) -> Model:
    """Return a model whose float32 convolutions by weights that are not constant are computed in blocks of channels.

    Their sums are added in another order. A convolution stays as it is if the block, by default that of this CPU, does
    not divide its channels.
    """
    graph = model.proto.graph
    if not any(node.op_type in CONVOLUTIONS for node in graph.node):
        return model
    block = channel_block() if block is None else block
    if not block:
        return model
    facts = ModelFacts.of(model)
    main, constants = facts.ids[MAIN], {t.name for t in graph.initializer}
    b = NodeBuilder(set(facts.view.names), opset=facts.view.opsets[""], region="amp.channels")
    changed = False
    for node in graph.node:
        layout = None
        if node.op_type in CONVOLUTIONS and not node.domain and node.input[1] not in constants:
            value = main[node.input[1]]
            weight = known_dims(facts.shapes.get(value))
            if weight is not None and facts.view.dtype(value) is DType.FLOAT:
                layout = _Layout.of(node, weight)
        if layout is None or any(channels % block for channels in layout.weight[:2]):
            b.append(node)
            continue
        _append(b, node, layout, block)
        changed = True
    if not changed:
        return model
    proto = clone(model.proto)
    refill(proto.graph, "node", b.nodes)
    proto.opset_import.add(domain=_DOMAIN, version=1)
    return replace(model, proto=proto)


def _append(b: NodeBuilder, node: NodeProto, layout: _Layout, block: int) -> None:
    """Append a convolution with its weight and its input in blocks, and the result as others read it."""
    results, channels, *kernel = layout.weight
    weight = node.input[1]
    if layout.turned:
        start, end = b.ints([-1, -1]), b.ints([-1 - k for k in kernel])
        turned = b.op("Slice", weight, start, end, b.ints([2, 3]), start)
        weight = b.op("Transpose", turned, perm=[1, 0, 2, 3])
    parted = b.reshape(weight, [results // block, block, channels // block, block, *kernel])
    weight = b.reshape(b.op("Transpose", parted, perm=[0, 2, 4, 5, 3, 1]), layout.weight)
    x = b.op("ReorderInput", node.input[0], domain=_DOMAIN)
    names = ("strides", "dilations", "pads")
    attributes = {"kernel_shape": kernel, **{name: getattr(layout, name) for name in names}}
    y = b.op("Conv", x, weight, *node.input[2:], domain=_DOMAIN, **attributes)
    back = onnx.helper.make_node(
        "ReorderOutput", [y], node.output, b.fresh(node.name), domain=_DOMAIN, channels=results
    )
    b.append(back)
