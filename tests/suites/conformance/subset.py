"""A small choice of cases that still has every operator."""

from collections.abc import Iterator, Mapping

from onnx import GraphProto

from amp_rewrite.files.protos import bodies
from suites.conformance.case import Case

SLOW = frozenset({"light/light_vgg19", "light/light_densenet121", "light/light_inception_v2", "light/light_resnet50"})


def subset(cases: Mapping[str, Case]) -> tuple[str, ...]:
    """For each set of operators that occurs in one model, the last case that has it."""
    chosen = {frozenset(_operators(case.original.graph)): key for key, case in cases.items() if key not in SLOW}
    return tuple(sorted(chosen.values()))


def _operators(graph: GraphProto) -> Iterator[str]:
    for node in graph.node:
        yield node.op_type
        for _, body in bodies(node):
            yield from _operators(body)
