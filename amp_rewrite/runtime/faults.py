"""Runtime faults on valid models: crashes and wrong numbers by release, and their workarounds.

Each row of `_tables/faults.json` names the affected releases, a provider and a workaround. Sessions of this package
disable optimizers or set provider options; conversions for an affected release keep ops in float32. This module has the
pattern of ops for each row, and reports name the matching ops. Tests verify the rows for the installed onnxruntime in
subprocesses; all other rows cite a source.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import Finding, ModelError
from amp_rewrite.files.model import Model
from amp_rewrite.ir.attributes import int_attribute, ints_attribute, text_attribute
from amp_rewrite.ir.dataflow import first_input, upstream
from amp_rewrite.ir.op_classes import CASTS, DEQUANTIZES, HEAVY, LAYERS, QUANTIZES
from amp_rewrite.ir.shapes import shape_of
from amp_rewrite.ir.view import Op, OpId, ValueId, View
from amp_rewrite.runtime.kernels import load_table, release_number

CPU = "CPUExecutionProvider"
CUDA = "CUDAExecutionProvider"
WEBGPU = "WebGpuExecutionProvider"
DtypeOf = Callable[[ValueId], DType | None]
"""A function that returns a value's element type at run time, which may differ from the type in the view."""


ONNXRUNTIME, TENSORRT, DIRECTML = "onnxruntime", "TensorRT", "DirectML"
"""Runtimes with known faults."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeFault:
    """A fault of a runtime.

    `since`: the first release known to have it; `until`: the first without it. `provider`: the affected provider of
    onnxruntime; None for all. `find`: a generator of the affected ops. `kinds`: op types that a model must contain for
    `find` to yield anything. `harm`: the wrong behavior, as a verb phrase. A fault has one workaround: `skip`, the
    optimizers to disable; `options`, the provider options to set; `keep`, True if conversions for an affected release
    keep the ops in float32; or `advice` for the user. `operators`: onnxruntime's own operators with faulty kernels,
    which fusions for an affected release do not use. `reported`: False if the harm depends on the machine or its
    settings, so reports do not name it. `source`: a page that describes the fault; "" if this project found it.
    `note`: details for maintainers.
    """

    name: str
    runtime: str
    provider: str | None
    since: tuple[int, ...]
    harm: str
    find: Callable[[View, DtypeOf], Iterator[Op]]
    until: tuple[int, ...] | None = None
    kinds: Collection[str] = ()
    skip: Sequence[str] = ()
    options: Mapping[str, str] = field(default_factory=dict)
    keep: bool = False
    advice: str = ""
    operators: Collection[str] = ()
    reported: bool = True
    source: str = ""
    note: str = ""

    def affects(self, target: RuntimeTarget) -> bool:
        """True if the runtime has the fault; without a release, a runtime has all of its faults."""
        if self.runtime != target.runtime or self.provider not in target.providers:
            return False
        number = release_number(target.release)
        first = self.since[: len(number)]  # a bare major version is affected if any of its minor versions is
        return not number or (first <= number and (self.until is None or number < self.until))

    @property
    def finding(self) -> str:
        """The message for reports."""
        release = ".".join(map(str, self.since))
        where = f" with the {self.provider}" if self.provider is not None else ""
        fact = f"{self.runtime} {release}{where} {self.harm}".replace("  ", " ")
        return f"{fact} · {self.remedy}"

    @property
    def remedy(self) -> str:
        """The workaround, as an imperative."""
        if self.skip:
            return f"load the model with disabled_optimizers={list(self.skip)}, as sessions of this package do"
        if self.options:
            settings = ", ".join(f"{name}={value}" for name, value in self.options.items())
            return f"set the provider option {settings}, as sessions of this package do"
        if self.advice:
            return self.advice
        return "keep these ops in float32 (`--keep`), or use another release"


@dataclass(frozen=True, slots=True)
class RuntimeTarget:
    """The target runtime: its release, or "" for any, and the providers of onnxruntime."""

    runtime: str = ONNXRUNTIME
    release: str = ""
    providers: tuple[str | None, ...] = (None, CPU, CUDA)

    @property
    def exact(self) -> bool:
        """True if the release is precise enough to compare with the releases of faults."""
        return self.runtime == ONNXRUNTIME or len(release_number(self.release)) > 1


# -- patterns ----------------------------------------------------------------------------------------

_TRANSPARENT = {*CASTS, "Dropout", "Expand", "Identity", "Reshape", "Transpose"}
"""Ops that onnxruntime removes, merges or swaps between a Transpose and a product if they do not change the shape."""


def swapped_transposes(view: View, dtype_of: DtypeOf) -> Iterator[Op]:
    """Yield Transposes in front of products: onnxruntime swaps them with a Cast, and then fails to fuse them.

    The failure leaves the graph half rewritten. Such a Transpose moves the first axis inward (`_inward`), and the
    product reads it through a Cast, either one in the model or one added by the CPU provider, which has no float16
    product. The operands have different ranks, or a rank is unknown; otherwise the fusion succeeds. O(nodes).
    """
    found = dict.fromkeys(op.id for op, _ in _transposes_of_products(view, dtype_of))
    return (view.ops[op] for op in found)


def _cast_transposes(view: View, dtype_of: DtypeOf) -> Iterator[Op]:
    pairs = ((op, product.results[0]) for op, product in _transposes_of_products(view, dtype_of))
    return (op for op, result in pairs if dtype_of(op.results[0]) is not dtype_of(result))


def _transposes_of_products(view: View, dtype_of: DtypeOf) -> Iterator[tuple[Op, Op]]:
    for product in view.of_kinds(_PRODUCTS):
        if product.signature is None or (not product.domain and product.signature.since < _FIRST_FUSED_PRODUCT):
            continue
        computed = dtype_of(product.results[0])
        for side, other in ((0, 1), (1, 0)):
            op = _inward(view, product, side)
            moved = dtype_of(op.results[0]) if op is not None else None
            if op is None or moved is DType.FLOAT or (moved is computed and computed is not DType.FLOAT16):
                continue
            shapes = shape_of(view, op.inputs[0]), shape_of(view, product.inputs[other])
            if None in shapes or len({len(shape) for shape in shapes if shape is not None}) > 1:
                yield op, product


_PRODUCTS = ("MatMul", "com.microsoft::FusedMatMul")
_FIRST_FUSED_PRODUCT = 9


def _inward(view: View, product: Op, side: int) -> Op | None:
    """Return the nearest Transpose upstream of an operand if it moves the first axis to one of the last two positions.

    It may do so together with Transposes further upstream.
    """
    transposes: list[Op] = []
    total: tuple[int, ...] = ()
    views: list[Op] = []
    for op, _ in upstream(view, product.inputs[side], first_input(_TRANSPARENT)):
        if op.scope != product.scope:
            break
        if op.kind != "Transpose":
            views += [op] if op.kind in ("Expand", "Reshape") else []
            continue
        perm = ints_attribute(op.node, "perm")
        if len(perm) < 3 or len(perm) != len(total or perm):
            break
        transposes.append(op)
        total = tuple(perm[axis] for axis in total) if total else perm
        if total[:-2] == (*range(1, len(perm) - 1),):
            shapes = [(shape_of(view, op.inputs[0]), shape_of(view, op.outputs[0])) for op in views]
            return transposes[0] if all(before is not None and before == after for before, after in shapes) else None
    return None


def _biased_layers(view: View, dtype_of: DtypeOf) -> Iterator[Op]:
    for op in _low(view, dtype_of, tuple(LAYERS)):
        biased = len(op.inputs) > 2 and view.constant(op.inputs[2]) is not None
        if biased and all(view.producer(value, *DEQUANTIZES) is not None for value in op.inputs[:2]):
            readers = [reader.kind for value in op.results for reader in view.readers(value)]
            if readers and all(kind in QUANTIZES for kind in readers):
                yield op


def _low(view: View, dtype_of: DtypeOf, kinds: Sequence[str]) -> Iterator[Op]:
    return (op for op in view.of_kinds(kinds) if any(dtype_of(value) is DType.FLOAT16 for value in op.results))


def _wide_heads(view: View, dtype_of: DtypeOf) -> Iterator[Op]:
    for op in _low(view, dtype_of, ("Attention",)):
        shape = shape_of(view, op.inputs[0])
        if shape is None or (width := shape[-1]) is None:
            continue
        heads = int_attribute(op.node, "q_num_heads", 1) if len(shape) == 3 else 1
        if width // max(heads, 1) > _MAX_HEAD_SIZE:
            yield op


_MAX_HEAD_SIZE = 256
_SKIP_NORMS = tuple(f"com.microsoft::{name}LayerNormalization" for name in ("Embed", "Skip", "SkipSimplified"))
_NORMS = ("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization")


def _summed_norms(view: View, dtype_of: DtypeOf) -> Iterator[Op]:
    """Yield the float16 norms of a sum, either fused or to be fused by onnxruntime."""
    for op in _low(view, dtype_of, (*_NORMS, *_SKIP_NORMS)):
        producer = view.producer(op.inputs[0])
        if op.kind in _SKIP_NORMS or (producer is not None and producer.kind == "Add"):
            yield op


def _grouped(view: View, dtype_of: DtypeOf) -> Iterator[Op]:
    return (op for op in _low(view, dtype_of, ("Conv", "ConvTranspose")) if int_attribute(op.node, "group", 1) > 1)


def _long_transposed(view: View, dtype_of: DtypeOf) -> Iterator[Op]:
    """Yield each float16 ConvTranspose with a spatial dimension above 2048 or unknown."""
    for op in _low(view, dtype_of, ("ConvTranspose",)):
        shape = shape_of(view, op.outputs[0])
        if shape is None or any(size is None or size > _EXACT_IN_FLOAT16 for size in shape[2:]):
            yield op


_EXACT_IN_FLOAT16 = 2048
"""Float16 represents every whole number up to this one."""


def _new_grid_modes(view: View, dtype_of: DtypeOf) -> Iterator[Op]:
    for op in view.of_kinds(("GridSample",)):
        mode = text_attribute(op.node, "mode", "linear")
        if op.signature is not None and op.signature.since >= _RENAMED_GRID_MODES and mode != "nearest":
            yield op


_RENAMED_GRID_MODES = 20
_CONVOLUTIONS = ("Conv", "ConvTranspose", "com.microsoft::FusedConv", "com.microsoft::NhwcConv")


def low_convolutions(view: View, dtype_of: DtypeOf) -> Iterator[Op]:
    for op in view.of_kinds(_CONVOLUTIONS):
        if any(dtype is not None and dtype.low for dtype in map(dtype_of, op.results)):
            yield op


def float32_products(view: View, dtype_of: DtypeOf) -> Iterator[Op]:
    """Yield the float32 products, convolutions, recurrent cells and attention ops; TF32 would round them."""
    return (op for op in view.of_kinds(HEAVY) if any(dtype_of(value) is DType.FLOAT for value in op.results))


def _without_tensor_cores(view: View, dtype_of: DtypeOf) -> Iterator[Op]:
    if next(float32_products(view, dtype_of), None) is not None:
        yield from low_convolutions(view, dtype_of)


_PATTERNS: Mapping[str, Callable[[View, DtypeOf], Iterator[Op]]] = {
    "transposed_product": swapped_transposes,
    "cast_transpose": _cast_transposes,
    "quantized_bias": _biased_layers,
    "wide_heads": _wide_heads,
    "summed_norms": _summed_norms,
    "grouped_convolution": _grouped,
    "norm_variance": partial(_low, kinds=("LayerNormalization",)),
    "untensored_convolution": _without_tensor_cores,
    "long_transposed_convolution": _long_transposed,
    "grid_mode": _new_grid_modes,
    "transposed_convolution": partial(_low, kinds=("ConvTranspose",)),
}
"""A generator of the affected ops for each fault."""


def _read(name: str, row: Mapping[str, Any]) -> RuntimeFault:
    ends = {end: release_number(row[end]) for end in ("since", "until") if end in row}
    return RuntimeFault(name=name, find=_PATTERNS[name], **{**row, **ends})


FAULTS = tuple(_read(name, row) for name, row in load_table("faults")["faults"].items())
"""All known faults."""


def fault_findings(
    view: View, dtype_of: DtypeOf, target: RuntimeTarget = RuntimeTarget(), rewritten: Collection[OpId] = ()
) -> Iterator[Finding]:
    """For each fault on the target, yield a finding about the first affected op of the model. O(nodes).

    `dtype_of`: the types after the conversion. `rewritten`: ops that the conversion rewrites.
    """
    for fault in FAULTS:
        relevant = fault.reported and fault.affects(target)
        op = next((op for op in fault.find(view, dtype_of) if op.id not in rewritten), None) if relevant else None
        if op is not None:
            yield Finding("runtime_hazard", op.name, fault.finding)


def faults(view: View, to: DType, target: RuntimeTarget) -> Iterator[tuple[Op, RuntimeFault]]:
    """Yield the ops with a fault on the target in the low type, each with its fault. O(nodes)."""

    def dtype_of(value: ValueId) -> DType | None:
        dtype = view.dtype(value)
        return to if dtype is DType.FLOAT else dtype

    for fault in FAULTS if target.exact else ():
        if fault.keep and fault.affects(target):
            for op in fault.find(view, dtype_of):
                yield op, fault


def faults_to_avoid(model: Model, kinds: frozenset[str], release: str, providers: Sequence[str]) -> list[RuntimeFault]:
    """Return the faults to work around in a session for a model with ops of these kinds.

    An invalid model or one with function calls is assumed to have every fault whose op types it contains.
    """
    avoidable = (fault for fault in FAULTS if fault.skip or fault.options)
    target = RuntimeTarget(release=release, providers=(None, providers[0]))
    possible = [fault for fault in avoidable if kinds.issuperset(fault.kinds) and fault.affects(target)]
    if not possible or model.proto.functions:
        return possible
    try:
        view = View.of(model)
    except ModelError:
        return possible
    return [fault for fault in possible if next(fault.find(view, view.dtype), None) is not None]
