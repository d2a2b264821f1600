"""Models on which a release of onnxruntime dies or miscomputes, although they are valid, and the way round.

A row of `HAZARDS` names releases, a provider, a pattern of ops, and the optimizers without which it does no harm.
Sessions of this package leave those out; reports name the ops. Tests hold each row in subprocesses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import Finding, ModelError
from amp_rewrite.files.model import Model
from amp_rewrite.ir.dataflow import Flow, first_input_of, only_reader, origin
from amp_rewrite.ir.op_classes import CASTS, COPIES, DEQUANTIZES, LAYERS, QUANTIZES, RELABELS
from amp_rewrite.ir.schema import attribute
from amp_rewrite.ir.view import Op, ValueId, View

CPU = "CPUExecutionProvider"
CUDA = "CUDAExecutionProvider"
Made = Callable[[ValueId], DType | None]
"""The element type in which a value is made, which may differ from that in the view."""


@dataclass(frozen=True, slots=True)
class RuntimeHazard:
    """A hazard of onnxruntime.

    `since`: the first release that is known to have it, and `until` the first without. `provider`: None for all.
    `kinds`: ops without which `find` yields nothing. `find`: the ops at which it happens. `harm`: a verb and its
    objects. `skip`: the optimizers to disable. `told`: reports name it; False where the harm depends on the machine.
    """

    name: str
    since: tuple[int, int]
    provider: str | None
    kinds: frozenset[str]
    find: Callable[[View, Made], Iterator[Op]]
    harm: str
    skip: tuple[str, ...]
    until: tuple[int, int] | None = None
    told: bool = True

    def holds(self, release: str, providers: Sequence[str]) -> bool:
        """True if a release of onnxruntime has the hazard with these providers, of which the first runs the model."""
        number = tuple(int(part) for part in release.split(".")[:2] if part.isdecimal())
        known = self.since <= number and (self.until is None or number < self.until)
        return known and (self.provider is None or self.provider == providers[0])

    @property
    def finding(self) -> str:
        """The message of a report."""
        release = ".".join(map(str, self.since))
        where = f" with the {self.provider}" if self.provider is not None else ""
        return (
            f"onnxruntime {release}{where} {self.harm} · open it with disabled_optimizers={list(self.skip)};"
            " `amp-rewrite doctor --open` tries whether it opens here"
        )


# -- patterns ----------------------------------------------------------------------------------------

_MOVED = RELABELS | {"Transpose"}
_NATIVE = {*CASTS, *COPIES, "Clip", "Dropout", "If", "LayerNormalization", "Loop", "Max", "Min", "Scan"} - {"Pad"}
"""Ops that the CPU provider runs in float16; the others it runs in float32, between Casts of its own."""


def _batch_transposes(view: View, made: Made) -> Iterator[Op]:
    """Yield float16 Transposes that move the batch axis inwards, and that a product with a constant reads."""
    passed = Flow.of(view, dict.fromkeys((*CASTS, "Identity"), (0,)))
    for op in view.ops:
        if op.kind != "Transpose" or (result := op.outputs[0]) is None or made(result) is not DType.FLOAT16:
            continue
        stated = attribute(op.node, "perm")
        perm = tuple(stated.ints) if stated is not None else ()
        inner = (*range(1, len(perm)), 0)
        if len(perm) < 3 or perm not in (inner, (*inner[:-2], 0, inner[-2])) or not _native(view, op, made):
            continue
        copies = passed.forth({result: None})
        products = [reader for value in copies for reader in view.readers(value) if reader.kind == "MatMul"]
        if any(_by_constant(view, product) and not _biased(view, product) for product in products):
            yield op


def _native(view: View, op: Op, made: Made) -> bool:
    """True if the values that an op moves come in float16: fed, cast to it, or computed in it."""
    source = op.inputs[0]
    maker = view.producer(source)
    return maker is None or maker.kind in _NATIVE or source is None or made(source) is not DType.FLOAT16


def _by_constant(view: View, op: Op) -> bool:
    """True if an operand of a product is a constant, or a moved one."""
    origins = (origin(view, value, first_input_of(_MOVED | CASTS)) for value in op.operands)
    return any(view.constant(value) is not None for value in origins)


def _biased(view: View, op: Op) -> bool:
    """True if a product is read by the sum with a constant alone, which onnxruntime makes one node of first."""
    total = only_reader(view, op.outputs[0], "Add", yielded=True)
    return total is not None and any(view.constant(value) is not None for value in total.inputs)


def _biased_layers(view: View, made: Made) -> Iterator[Op]:
    """Yield layers between quantizers with float16 scales whose bias is a constant in floats."""
    for op in view.ops:
        if op.kind not in LAYERS or len(op.inputs) < 3 or view.constant(op.inputs[2]) is None:
            continue
        operands = [view.producer(value) for value in op.inputs[:2]]
        decoded = all(maker is not None and maker.kind in DEQUANTIZES for maker in operands)
        result = op.outputs[0]
        if decoded and result is not None and made(result) is DType.FLOAT16:
            readers = [reader.kind for reader in view.readers(result)]
            if readers and all(kind in QUANTIZES for kind in readers):
                yield op


def _recurrent(view: View, made: Made) -> Iterator[Op]:
    """Yield float16 LSTMs."""
    lstms = (op for op in view.ops if op.kind == "LSTM")
    yield from (op for op in lstms if any(made(v) is DType.FLOAT16 for v in op.results))


HAZARDS = (
    RuntimeHazard(
        "transposed_product",
        (1, 31),
        CPU,
        frozenset({"Transpose", "MatMul"}),
        _batch_transposes,
        "dies (SIGSEGV) at its default level of a float16 Transpose of the batch axis before MatMul with a constant",
        ("MatmulTransposeFusion",),
    ),
    RuntimeHazard(
        "quantized_bias",
        (1, 31),
        None,
        frozenset({"DequantizeLinear", "QuantizeLinear"}),
        _biased_layers,
        "quantizes a bias between float16 quantizers anew, with a scale that float16 does not hold",
        ("WeightBiasQuantization",),
    ),
    RuntimeHazard(
        "recurrent_layout",
        (1, 31),
        CPU,
        frozenset({"LSTM"}),
        _recurrent,
        "may die at its default level of a float16 LSTM before a Transpose",
        ("NchwcTransformer",),
        told=False,
    ),
)
"""All known hazards."""


def told(view: View, made: Made) -> Iterator[Finding]:
    """Yield a finding for each hazard in a model, at its first op. `made`: the types after a conversion. O(nodes)."""
    kinds = {op.kind for op in view.ops}
    for hazard in HAZARDS:
        op = next(hazard.find(view, made), None) if hazard.told and hazard.kinds <= kinds else None
        if op is not None:
            yield Finding("runtime_hazard", op.name, hazard.finding)


def skipped(model: Model, kinds: frozenset[str], release: str, providers: Sequence[str]) -> list[str]:
    """Return the optimizers to disable before a model with ops of these kinds is opened.

    A model that this package cannot read is taken to have each hazard whose ops it has.
    """
    possible = [hazard for hazard in HAZARDS if hazard.kinds <= kinds and hazard.holds(release, providers)]
    if not possible:
        return []
    try:
        view = View.of(model)
    except ModelError:
        return [name for hazard in possible for name in hazard.skip]
    present = (hazard for hazard in possible if next(hazard.find(view, view.dtype), None) is not None)
    return [name for hazard in present for name in hazard.skip]
