"""Suitable providers, releases and session options of onnxruntime for a model.

Without TF32, onnxruntime runs no convolution on tensor cores, not even in a low type (`untensored_convolution` in
`faults.py`). With channels last and a fused bias, convolutional networks need no layout changes around each kernel; the
bias cannot be fused without channels last.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from onnx import NodeProto

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import ModelError, count
from amp_rewrite.files.model import Model
from amp_rewrite.ir.schema import signature
from amp_rewrite.ir.shapes import shape_of
from amp_rewrite.ir.view import Op, ValueId, View
from amp_rewrite.runtime.faults import (
    CPU,
    CUDA,
    FAULTS,
    ONNXRUNTIME,
    WEBGPU,
    DtypeOf,
    RuntimeTarget,
    float32_products,
    low_convolutions,
)
from amp_rewrite.runtime.kernels import Kernels, load_kernels, load_webgpu_kernels, release_number, releases

CONTRIB_DOMAIN = "com.microsoft"
CUDA_ONLY = frozenset({"BiasSplitGelu", "GroupNorm", "SkipGroupNorm"})
"""Operators of this domain that fusions create and that do not have a CPU kernel."""


def refusal(kernels: Kernels, node: NodeProto, opset: int, dtypes: Iterable[DType]) -> str | None:
    """Return why a node cannot run correctly in one of the types; None if it can run in all."""
    is_contrib = node.domain == CONTRIB_DOMAIN
    if is_contrib:
        attributes = [a.name for a in node.attribute]
        unknown = kernels.contrib_refusal(node.op_type, len(node.input), len(node.output), attributes)
        if unknown is not None:
            return unknown
    schema = signature(node.domain, node.op_type, opset)
    if schema is None:
        return None
    for dtype in dtypes:
        types = dict.fromkeys(("T", "T1", "T2"), f"tensor({dtype.onnx_name})")
        missing = kernels.refusal(node.domain, node.op_type, schema.since, types)
        if missing is not None:
            return missing
    target = RuntimeTarget(ONNXRUNTIME, _release(kernels))
    wrong = (fault for fault in FAULTS if is_contrib and node.op_type in fault.operators and fault.affects(target))
    return next((f"{kernels.runtime} {fault.harm}" for fault in wrong), None)


def run_as_bodies(view: View, kernels: Kernels | None) -> list[Op]:
    """Return the ops without a kernel; the runtime runs their function bodies instead."""
    return [op for op in view.ops if _runs_as_body(op, kernels)] if kernels is not None else []


def _runs_as_body(op: Op, kernels: Kernels) -> bool:
    schema = op.signature
    if schema is None or op.domain or not schema.expandable or op.bodies:
        return False
    return not kernels.has("", op.op_type, schema.since)


def oldest_release(view: View, kernels: Kernels, to: DType) -> str | None:
    """Return the oldest release to run onnxruntime's own operators correctly, as do all later ones up to `kernels`.

    None for a model without such operators. O(nodes), and O(kinds of nodes) for each release.
    """
    nodes = {_form(op.node): op.node for op in view.ops if op.domain == CONTRIB_DOMAIN}
    if not nodes:
        return None
    both, newest = (DType.FLOAT, to), _release(kernels)
    correct = [
        (node, both if refusal(kernels, node, 1, both) is None else both[1:])
        for node in nodes.values()
        if refusal(kernels, node, 1, both[1:]) is None
    ]
    oldest = newest
    for release in reversed([name for name in releases() if release_number(name) < release_number(newest)]):
        older = load_kernels(release)
        loads = (older.opset or 0) >= view.opset and (older.ir or 0) >= view.model.proto.ir_version
        if not loads or any(refusal(older, node, 1, types) is not None for node, types in correct):
            break
        oldest = release
    return oldest


def own_operators(view: View) -> list[str]:
    return sorted({op.op_type for op in view.ops if op.domain == CONTRIB_DOMAIN})


def release_refusal(needed: str, operators: Collection[str], release: str, provider: str) -> str | None:
    """Return why a release and its first provider cannot run a file correctly; None if they can.

    `needed`: the oldest release that can. `operators`: onnxruntime's own operators in the file.
    """
    if release_number(release) and release_number(release) < release_number(needed):
        return (
            f"the model needs onnxruntime {needed} or later for {', '.join(operators)}, but {release} is installed and"
            f" rejects or miscomputes it; update onnxruntime, or convert the source with --target ort-cuda:{release}"
        )
    unsupported = [name for name in operators if not _serves(provider, name)]
    if unsupported:
        way = "with --fuse contrib" if provider == CPU else "for that provider with --target"
        return (
            f"{provider} has no known kernel for {', '.join(unsupported)} of {CONTRIB_DOMAIN}; use {CUDA}, or convert"
            f" the source {way}"
        )
    return None


def _serves(provider: str, operator: str) -> bool:
    if provider == CPU:
        return operator not in CUDA_ONLY
    return provider == CUDA or (provider == WEBGPU and load_webgpu_kernels().has(CONTRIB_DOMAIN, operator, 1))


def _release(kernels: Kernels) -> str:
    return kernels.runtime.rpartition(" ")[2]


def _form(node: NodeProto) -> tuple[object, ...]:
    return node.op_type, len(node.input), len(node.output), tuple(sorted(a.name for a in node.attribute))


# -- options of CUDA -----------------------------------------------------------------------------------

TF32 = "tf32"
"""The metadata key for TF32: "1" if a check on data permits it in the float32 products of the file."""
CHANNELS_LAST: Mapping[str, str] = {"prefer_nhwc": "1", "fuse_conv_bias": "1"}
_MIN_CONVOLUTIONS = 8
"""Minimum number of convolutions in a convolutional network; one or two only split an image or sound into patches."""
_WEIGHT_RANK = 4
"""The rank of a two-dimensional convolution's weight."""


@dataclass(frozen=True, slots=True)
class CudaOptions:
    """Options of the CUDA provider for a model.

    `tf32`: True if TF32 would not round any float32 product, or if the file permits it. `channels_last`: True if
    channels last is worth a try. `cost`: the cost of TF32 being off, and how to avoid it; "" if there is none.
    """

    tf32: bool = False
    channels_last: bool = False
    cost: str = ""

    @property
    def without_layout(self) -> dict[str, str]:
        return {"use_tf32": str(int(self.tf32))}

    @property
    def line(self) -> str:
        """A line of Python to open a session with these options; "" if they are onnxruntime's defaults."""
        if not self.channels_last:
            return ""
        options = ", ".join(f'"{name}": {value}' for name, value in CHANNELS_LAST.items())
        return f'InferenceSession(path, providers=[("{CUDA}", {{{options}}}), "CPUExecutionProvider"])'


def cuda_options(model: Model) -> CudaOptions:
    """Return the options for a model, with TF32 off if the model is invalid or has functions. O(nodes)."""
    try:
        view = View.of(model)
    except ModelError:
        return CudaOptions()
    return cuda_options_of(view, view.dtype, permitted=model.recorded(TF32) == "1")


def cuda_options_of(view: View, dtype_of: DtypeOf, *, permitted: bool = False) -> CudaOptions:
    """Return the options for a model with values of the types in `dtype_of`.

    `permitted`: allow TF32 in float32 products if there are low convolutions, and thus not in a float32 twin.
    """
    if view.model.proto.functions:
        return CudaOptions()
    low = list(low_convolutions(view, dtype_of))
    if not (permitted and low) and next(float32_products(view, dtype_of), None) is not None:
        cost = f"{count(len(low), 'convolution')} in a low type run without tensor cores, {_COST}" if low else ""
        return CudaOptions(cost=cost)
    planar = sum(dtype_of(op.results[0]) is DType.FLOAT16 and _rank(view, op.inputs[1]) == _WEIGHT_RANK for op in low)
    return CudaOptions(tf32=True, channels_last=planar >= _MIN_CONVOLUTIONS)


_COST = "because the float32 products of the model need TF32 off; " + next(
    fault.remedy for fault in FAULTS if fault.name == "untensored_convolution"
)


def _rank(view: View, value: ValueId | None) -> int | None:
    shape = None if value is None else shape_of(view, value)
    return None if shape is None else len(shape)
