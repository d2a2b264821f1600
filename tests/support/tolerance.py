"""How far the outputs of a lowered model may be off."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx

from amp_rewrite.dtypes import DType


def longest_chain(graph: onnx.GraphProto, depth: Mapping[str, int]) -> int:
    """How many ops follow one another at most: each may round once. A body counts as one pass."""
    reached = dict(depth)
    for node in graph.node:
        start = max((reached.get(value, 0) for value in node.input), default=0)
        inner = [longest_chain(a.g, reached) for a in node.attribute if a.HasField("g")]
        reached.update(dict.fromkeys(node.output, max([start + 1, *inner])))
    return max(reached.values(), default=0)


def rounding_bound(graph: onnx.GraphProto, reference: np.ndarray[Any, Any], low: DType) -> float:
    """How far an output of a graph that is lowered may be off, absolutely.

    Each rounding is off by eps/2 of its value at most. Over n of them in a row the errors add up like a random
    walk, lambda * sqrt(n) * eps/2 (Higham and Mary, "A new approach to probabilistic rounding error analysis",
    SIAM J. Sci. Comput. 41, 2019). With lambda = 2, models that were lowered as a whole stay below it by a
    factor of 3 and more on a CPU. Relative to the largest output, not to each element: sums cancel.
    """
    return float(2 * np.sqrt(longest_chain(graph, {})) * low.eps / 2 * np.abs(reference).max())
