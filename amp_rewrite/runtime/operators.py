"""Releases and providers for a node."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from onnx import NodeProto

from amp_rewrite.dtypes import DType
from amp_rewrite.ir.schema import signature
from amp_rewrite.ir.view import View
from amp_rewrite.runtime.faults import CPU, CUDA, FAULTS, ONNXRUNTIME, WEBGPU, RuntimeTarget
from amp_rewrite.runtime.kernels import Kernels, load_kernels, load_webgpu_kernels, release_number, releases

OWN_DOMAIN = "com.microsoft"


def refusal(kernels: Kernels, node: NodeProto, opset: int, dtypes: Iterable[DType]) -> str | None:
    """Return why a release does not run a node right in all of the types; None if it does."""
    own = node.domain == OWN_DOMAIN
    if own:
        attributes = [stated.name for stated in node.attribute]
        foreign = kernels.contrib_refusal(node.op_type, len(node.input), len(node.output), attributes)
        if foreign is not None:
            return foreign
    known = signature(node.domain, node.op_type, opset)
    if known is None:
        return None
    for dtype in dtypes:
        types = dict.fromkeys(("T", "T1", "T2"), f"tensor({dtype.onnx_name})")
        missing = kernels.refusal(node.domain, node.op_type, known.since, types)
        if missing is not None:
            return missing
    aim = RuntimeTarget(ONNXRUNTIME, _release(kernels))
    wrong = (fault for fault in FAULTS if own and node.op_type in fault.operators and fault.affects(aim))
    return next((f"{kernels.runtime} {fault.harm}" for fault in wrong), None)


def oldest_release(view: View, kernels: Kernels, to: DType) -> str | None:
    """Return the oldest release for onnxruntime's own operators; each later one, up to `kernels`, runs them right, too.

    None for a model without such operators. O(nodes), and O(kinds of nodes) for each release.
    """
    nodes = {_form(op.node): op.node for op in view.ops if op.domain == OWN_DOMAIN}
    if not nodes:
        return None
    both, own = (DType.FLOAT, to), _release(kernels)
    right = [
        (node, both if refusal(kernels, node, 1, both) is None else both[1:])
        for node in nodes.values()
        if refusal(kernels, node, 1, both[1:]) is None
    ]
    oldest = own
    for release in reversed([name for name in releases() if release_number(name) < release_number(own)]):
        older = load_kernels(release)
        opens = (older.opset or 0) >= view.opset and (older.ir or 0) >= view.model.proto.ir_version
        if not opens or any(refusal(older, node, 1, types) is not None for node, types in right):
            break
        oldest = release
    return oldest


def own_operators(view: View) -> list[str]:
    """Return the names of onnxruntime's own operators in a model."""
    return sorted({op.op_type for op in view.ops if op.domain == OWN_DOMAIN})


def misfit(needed: str, operators: Collection[str], release: str, provider: str) -> str | None:
    """Return why a release with this first provider does not run a file right; None if it does.

    `needed`: the oldest release that does. `operators`: onnxruntime's own operators in the file.
    """
    if release_number(release) and release_number(release) < release_number(needed):
        return (
            f"it needs onnxruntime {needed} or later for {', '.join(operators)}, and this is {release}, which refuses"
            f" or miscomputes it; update onnxruntime, or convert the source with --target ort-cuda:{release}"
        )
    lacking = [name for name in operators if not _serves(provider, name)]
    if lacking:
        return (
            f"{provider} has no known kernel for {', '.join(lacking)} of {OWN_DOMAIN}; use {CUDA}, or convert the"
            " source for that provider with --target"
        )
    return None


def _serves(provider: str, operator: str) -> bool:
    return provider in (CUDA, CPU) or (provider == WEBGPU and load_webgpu_kernels().has(OWN_DOMAIN, operator, 1))


def _release(kernels: Kernels) -> str:
    return kernels.runtime.rpartition(" ")[2]


def _form(node: NodeProto) -> tuple[object, ...]:
    return node.op_type, len(node.input), len(node.output), tuple(sorted(a.name for a in node.attribute))
