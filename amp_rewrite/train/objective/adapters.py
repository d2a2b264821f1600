"""Low-rank adapters (LoRA): beside each chosen product x W stands s (x A) B, and only A and B are trained.

Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021. B starts at 0, so that training starts from the
model as it is; merging adds s A B to W and drops the adapters.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from onnx import NodeProto
from onnx.helper import get_node_attr_value, make_node
from onnx.numpy_helper import from_array

from amp_rewrite.errors import TrainingError
from amp_rewrite.files.casting import Array
from amp_rewrite.files.model import Model
from amp_rewrite.files.protos import clone, refill
from amp_rewrite.ir.graphs import names_read
from amp_rewrite.ir.names import claimed
from amp_rewrite.ir.view import View

REGION = "amp.adapter"
FACTOR_A, FACTOR_B = "lora_A", "lora_B"


@dataclass(frozen=True, slots=True)
class Adapters:
    """Settings of adapters: patterns of weights, the rank r, and alpha; the product A B is taken times alpha / r."""

    patterns: tuple[str, ...]
    rank: int = 8
    alpha: float = 8.0

    @classmethod
    def parsed(cls, text: str) -> Adapters:
        """Return the settings of a text such as "q_proj,v_proj:r=8,alpha=16". TrainingError for anything else.

        A pattern is a glob on the name of a weight, or on the last parts of its name without ".weight".
        """
        names, _, settings = text.partition(":") if isinstance(text, str) else ("", "", "")
        patterns = tuple(name.strip() for name in names.split(",") if name.strip())
        found: dict[str, float] = {}
        try:
            for setting in filter(None, (part.strip() for part in settings.split(","))):
                key, _, value = setting.partition("=")
                if key not in ("r", "alpha") or key in found:
                    raise ValueError
                found[key] = int(value) if key == "r" else float(value)
            rank = int(found.get("r", 8))
            alpha = float(found.get("alpha", rank))
            if not patterns or rank < 1 or not 0 < alpha < float("inf"):
                raise ValueError
        except ValueError:
            raise TrainingError(
                f"adapters {text!r} are not settings; write PATTERN,…:r=RANK or PATTERN,…:r=RANK,alpha=NUMBER, with a"
                " rank of 1 or more"
            ) from None
        return cls(patterns, rank, alpha)

    def matches(self, name: str) -> bool:
        """Return True if a pattern is, or matches, the name of a weight or the end of its module's."""
        module = name.removesuffix(".weight").replace("/", ".")
        return any(
            fnmatch.fnmatchcase(name, p) or fnmatch.fnmatchcase(module, p) or fnmatch.fnmatchcase(module, f"*.{p}")
            for p in self.patterns
        )


def with_adapters(model: Model, text: str, seed: int = 0) -> tuple[Model, tuple[str, ...]]:
    """Return the model with adapters and the names of their factors.

    TrainingError if a pattern matches no weight, and for a weight that is read by anything but products x W.
    """
    settings, proto, taken = Adapters.parsed(text), clone(model.proto), set(View.of(model).names)
    graph = proto.graph
    rng, names = np.random.default_rng([seed, 0xADA]), []
    chosen = {t.name: tuple(t.dims) for t in graph.initializer if len(t.dims) == 2 and settings.matches(t.name)}
    for pattern in settings.patterns:
        if not any(replace(settings, patterns=(pattern,)).matches(name) for name in chosen):
            known = ", ".join(t.name for t in graph.initializer if len(t.dims) == 2)[:200]
            raise TrainingError(f"no weight of two dimensions matches the adapter {pattern!r}; the model has {known}")
    after: dict[int, list[NodeProto]] = {}
    for weight, dims in chosen.items():
        products = list(_products(graph.node, weight))
        inner, outer = dims if not products[0][1] else dims[::-1]
        stem = weight.removesuffix(".weight")
        values = {
            FACTOR_A: np.array(rng.uniform(-1, 1, (inner, settings.rank)) / np.sqrt(inner), np.float32),
            FACTOR_B: np.zeros((settings.rank, outer), np.float32),
        }
        a, b, scale = (claimed(f"{stem}.{part}", taken) for part in (FACTOR_A, FACTOR_B, "lora_scale"))
        for name, array in zip((a, b), values.values(), strict=True):
            graph.initializer.append(from_array(array, name))
        graph.initializer.append(from_array(np.array(settings.alpha / settings.rank, np.float32), scale))
        names += [a, b]
        for at, _ in products:
            node = graph.node[at]
            result = node.output[0]
            node.output[0] = base = claimed(f"{result}/base", taken)
            low, scaled, high = (claimed(f"{result}/{part}", taken) for part in ("low", "scaled", "high"))
            after[at] = [
                make_node("MatMul", [node.input[0], a], [low], name=f"{REGION}/{low}"),
                make_node("Mul", [low, scale], [scaled], name=f"{REGION}/{scaled}"),
                make_node("MatMul", [scaled, b], [high], name=f"{REGION}/{high}"),
                make_node("Add", [base, high], [result], name=f"{REGION}/{result}"),
            ]
    nodes = [part for at, node in enumerate(graph.node) for part in (node, *after.get(at, ()))]
    refill(graph, "node", nodes)
    return replace(model, proto=proto), tuple(names)


def merged(model: Model) -> Model:
    """Return the model with adapters added to their weights, and without their nodes and factors."""
    proto = clone(model.proto)
    graph = proto.graph
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    producer = {name: node for node in graph.node for name in node.output}
    added = [node for node in graph.node if node.name.startswith(f"{REGION}/")]
    gone = {name for node in added for name in node.input if name in tensors}
    done: set[str] = set()
    for node in (node for node in added if node.op_type == "Add"):
        base, high = (producer[name] for name in node.input)
        scaled = producer[high.input[0]]
        factors = (producer[scaled.input[0]].input[1], high.input[1], scaled.input[1])
        weight, transposed = _weight(base, producer)
        if weight not in done:
            a, b, scale = (model.array(tensors[name]).astype(np.float64) for name in factors)
            change: Array = scale * (a @ b)
            value = model.array(tensors[weight]) + (change.T if transposed else change)
            tensors[weight].CopyFrom(from_array(np.ascontiguousarray(value, np.float32), weight))
            done.add(weight)
        base.output[0] = node.output[0]
    refill(graph, "node", [node for node in graph.node if not node.name.startswith(f"{REGION}/")])
    refill(graph, "initializer", [tensor for tensor in graph.initializer if tensor.name not in gone])
    return replace(model, proto=proto)


def _products(nodes: Sequence[NodeProto], weight: str) -> Iterator[tuple[int, bool]]:
    """Yield the position of each product with a weight, and True if it reads the weight transposed."""
    producer = {name: node for node in nodes for name in node.output}
    ends = [weight, *(n.output[0] for n in nodes if n.op_type == "Transpose" and n.input[0] == weight)]
    found = False
    for at, node in enumerate(nodes):
        read = [name for name in ends if name in names_read([node])]
        if not read or node.output[0] in ends:
            continue
        plain = node.op_type == "MatMul" or (
            node.op_type == "Gemm" and not _attribute(node, "transA", 0) and _attribute(node, "alpha", 1.0) == 1.0
        )
        if not plain or len(node.input) < 2 or node.input[1] not in ends or node.input[0] in ends:
            raise TrainingError(
                f"an adapter of {weight!r} needs products x W, but node {node.name!r} ({node.op_type}) reads it, too;"
                " leave this weight out"
            )
        found = True
        yield at, _weight(node, producer)[1]
    if not found:
        raise TrainingError(f"an adapter of {weight!r} needs a product, but none reads it; leave this weight out")


def _weight(node: NodeProto, producer: dict[str, NodeProto]) -> tuple[str, bool]:
    """Return the weight of a product, and True if its rows are outputs."""
    name, transposed = node.input[1], node.op_type == "Gemm" and bool(_attribute(node, "transB", 0))
    before = producer.get(name)
    return (name, transposed) if before is None else (before.input[0], not transposed)


def _attribute(node: NodeProto, name: str, default: float) -> float:
    value = get_node_attr_value(node, name) if any(a.name == name for a in node.attribute) else default
    return float(value)
