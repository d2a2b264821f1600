"""Types and parsers of options with a fixed choice: low type, target, fusion, opset, shift and headroom."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeAlias, get_args

from amp_rewrite.dtypes import MIXED, DType
from amp_rewrite.errors import PolicyError, advice, spelled
from amp_rewrite.ir.versions import OLDEST_MOVED

if TYPE_CHECKING:
    import numpy as np

    from amp_rewrite.files.model import Model
    from amp_rewrite.runtime.faults import RuntimeTarget
    from amp_rewrite.runtime.kernels import Kernels, Limits

Level = Literal["default", "tensor-cores-only", "treat-gray-as-deny", "unsafe-force-all", "lower-all"]
Safety = Literal["default", "none"]
Quantized = Literal["keep", "rescale"]
Fuse = Literal["auto", "none", "basic", "contrib", "diffusion"]
Assumption = Literal["rows-see-a-key"]
ROWS_SEE: Assumption = "rows-see-a-key"
Placement = Literal["mincut", "propagate"]
TargetName = Literal["ort-cuda", "onnx", "tensorrt", "directml", "openvino", "coreml", "qnn", "webgpu"]


# -- the low type --------------------------------------------------------------------------------


LowName = Literal["float16", "fp16", "f16", "half", "bfloat16", "bf16", "mixed_float16", "mixed_bfloat16"]
"""Names of a low type, for type checkers."""


class TorchType(Protocol):
    """A torch.dtype, recognized without importing torch."""

    @property
    def is_floating_point(self) -> bool:
        """True for floating-point types."""


class PrecisionPolicy(Protocol):
    """A `Policy`, recognized without importing `amp_rewrite.train`."""

    @property
    def lowers(self) -> DType | None:
        """The low type of a conversion."""


LowType: TypeAlias = "LowName | int | DType | PrecisionPolicy | type[np.generic] | np.dtype[Any] | TorchType"
"""Everything accepted as a low type; an int is a `TensorProto.DataType` code."""
_LOW_FORMS = "use float16 (f16, fp16, half), bfloat16 (bf16), mixed_float16 or mixed_bfloat16"


def low_type(to: object) -> DType:
    """Return the low type for a type accepted by `DType.parse`, or for a mixed policy.

    PolicyError for anything else, including other types, and policies that lower nothing or also lower the results.
    """
    name = to.strip().lower() if isinstance(to, str) else ""
    if name in MIXED:
        return MIXED[name]
    try:
        dtype = DType.parse(to)
    except PolicyError:
        policy: Any = to
        if isinstance(policy, type) or not hasattr(policy, "lowers"):
            raise PolicyError(f"unknown type or policy {to!r}; {advice(name, get_args(LowName), _LOW_FORMS)}") from None
        if policy.lowers is None:
            remedy = "use mixed_float16 or mixed_bfloat16"
            raise PolicyError(f"policy {policy.name!r} lowers nothing; {remedy}") from None
        if not policy.mixed:
            remedy = f"use mixed_{policy.name}, and {spelled('io', 'low')} for low inputs and outputs"
            raise PolicyError(f"policy {policy.name!r} does not keep results in float32; {remedy}") from None
        return DType(policy.lowers)
    if not dtype.low:
        raise PolicyError(f"cannot lower to {dtype.spelling}; use float16 or bfloat16")
    return dtype


# -- targets ---------------------------------------------------------------------------------------


def one_of(words: Collection[str], spelling: object, what: str) -> str:
    """Return the matching word, ignoring case and the difference between "_" and "-"; PolicyError if there is none."""
    word = str(spelling).strip().lower().replace("_", "-")
    if word in words:
        return word
    raise PolicyError(f"unknown value {spelling!r} for {what}; {advice(spelling, words)}")


_TARGET_ALIASES = {"cuda": "ort-cuda", "gpu": "ort-cuda", "trt": "tensorrt", "dml": "directml"}


@dataclass(frozen=True)
class Target:
    """The target runtime of a conversion, which determines the legal types.

    For `ORT_CUDA`, onnxruntime's CUDA provider, an op is lowered only if a kernel supports its combination of types.
    For `ONNX`, only the schema is used. For `WEBGPU`, onnxruntime's WebGPU provider, its kernels are used, and the
    longest sums stay float32. For all others, the schema is used, all float types of an op are the same, and ops that
    the runtime's documentation excludes stay float32 (docs/reference/targets.md).

    Args:
        word: the name of the runtime.
        release: the release of the runtime; "" for the newest known one.
    """

    word: str
    release: str = ""

    ORT_CUDA: ClassVar[Target]
    ONNX: ClassVar[Target]
    TENSORRT: ClassVar[Target]
    DIRECTML: ClassVar[Target]
    OPENVINO: ClassVar[Target]
    COREML: ClassVar[Target]
    QNN: ClassVar[Target]
    WEBGPU: ClassVar[Target]

    @classmethod
    def parse(cls, spelling: str | Target) -> Target:
        """Return the target for a name in any case, with an optional release ("ort-cuda:1.22", "tensorrt:11.2").

        Raises:
            PolicyError: the name or the release is unknown.
        """
        if isinstance(spelling, cls):
            return spelling
        name, colon, release = (part.strip() for part in str(spelling).partition(":"))
        family = cls(_TARGET_ALIASES.get(name.lower()) or one_of(get_args(TargetName), name, "target"))
        if not colon:
            return family
        if family == cls.ORT_CUDA:
            from amp_rewrite.runtime.kernels import known_release, release_number  # late: few targets name a release

            known = known_release(release or "none")
            exact = release_number(known)[: len(release_number(release))] == release_number(release)
            return cls(family.word, known if exact else release)
        if family != cls.TENSORRT or release.partition(".")[0] not in ("10", "11"):
            legal = "use a target such as ort-cuda:1.22, tensorrt:10 or tensorrt:11.2"
            raise PolicyError(f"unknown release {release!r} of target {family.value}; {legal}")
        return cls(family.word, release)

    @property
    def value(self) -> str:
        """The name of the runtime, with the release if there is one."""
        return f"{self.word}:{self.release}" if self.release else self.word

    @property
    def family(self) -> Target:
        """The target without a release."""
        return Target(self.word)

    @property
    def kernels(self) -> Kernels | None:
        """The kernel table of the target; None if its kernels are unknown."""
        if self.family not in (Target.ORT_CUDA, Target.WEBGPU):
            return None
        from amp_rewrite.runtime import kernels  # late: not every command converts

        if self.family == Target.WEBGPU:
            return kernels.load_webgpu_kernels()
        return kernels.load_kernels(kernels.known_release(self.release) if self.release else "")

    @property
    def limits(self) -> Limits | None:
        """The documented limits of the runtime; None for onnxruntime's CUDA provider and for ONNX."""
        from amp_rewrite.runtime.kernels import LIMITS  # late: not every command converts

        return LIMITS.get(self.word)

    @property
    def runtime_target(self) -> RuntimeTarget:
        """The target as in the table of faults."""
        from amp_rewrite.runtime import faults  # late: not every command converts

        runtime = {"tensorrt": faults.TENSORRT, "directml": faults.DIRECTML}.get(self.word)
        if runtime is not None:
            return faults.RuntimeTarget(runtime, self.release, (None, faults.CUDA))
        if self.word == "ort-cuda" and self.kernels is not None:
            return faults.RuntimeTarget(release=self.kernels.runtime.rpartition(" ")[2])
        webgpu = (faults.WEBGPU,) if self == Target.WEBGPU else ()
        return faults.RuntimeTarget(providers=(None, faults.CPU, *webgpu))

    @property
    def opset(self) -> int | None:
        """The newest ai.onnx opset of the runtime; None if unknown."""
        source = self.kernels or self.limits
        return None if source is None else source.opset


for _word in get_args(TargetName):
    setattr(Target, _word.upper().replace("-", "_"), Target(_word))


def installed(target: Target, to: DType) -> Target:
    """Return the target with the installed release of onnxruntime; PolicyError if it cannot compute in the type."""
    if target == Target.WEBGPU and to is DType.BFLOAT16:
        raise PolicyError("target 'webgpu' does not support bfloat16, since WebGPU's shaders do not; use float16")
    limits = target.limits
    if limits is not None and to not in limits.low:
        types = " and ".join(sorted(dtype.spelling for dtype in limits.low))
        remedy = f"use {spelled('to', types)}"
        raise PolicyError(f"{limits.runtime} does not compute in {to.spelling}, only in {types}; {remedy}")
    if target != Target.ORT_CUDA:
        return target
    from amp_rewrite.runtime import kernels  # late: help needs no package metadata

    release = kernels.installed_release()
    return target if release in ("", kernels.known_release("")) else Target.parse(f"{target.value}:{release}")


BY_PROVIDER = {
    "CUDAExecutionProvider": Target.ORT_CUDA,
    "CPUExecutionProvider": Target.ORT_CUDA,
    "TensorrtExecutionProvider": Target.TENSORRT,
    "NvTensorRTRTXExecutionProvider": Target.TENSORRT,
    "DmlExecutionProvider": Target.DIRECTML,
    "OpenVINOExecutionProvider": Target.OPENVINO,
    "CoreMLExecutionProvider": Target.COREML,
    "QNNExecutionProvider": Target.QNN,
    "WebGpuExecutionProvider": Target.WEBGPU,
}
"""Targets by onnxruntime's execution provider."""
KEEP_KEY = "amp_rewrite.keep"
"""Metadata key for the patterns of `keep`, one per line."""
NEEDS = "needs"
"""Metadata setting for the oldest onnxruntime release that runs the model, if no other runtime does."""


def recorded_target(model: Model) -> Target | None:
    name = model.recorded("target")
    if not name:
        return None
    try:
        return Target.parse(name)
    except PolicyError:  # a later version may have written it
        return None


AUTO_SHIFT, NO_SHIFT = "auto", "none"
MAX_SHIFT = 24
"""The largest useful exponent of a shift."""

Shift = str | int
Opset = str | int
AUTO_OPSET, KEEP_OPSET = "auto", "keep"


def parse_shift(spelling: Shift) -> Shift:
    """Return "auto", "none" or an exponent; PolicyError for other text and for an exponent out of range."""
    return _word_or_number(spelling, (AUTO_SHIFT, NO_SHIFT), range(1, MAX_SHIFT + 1), "cannot shift by")


def parse_opset(spelling: Opset) -> Opset:
    """Return "auto", "keep" or an opset; PolicyError for other text and for an unsupported opset."""
    words = AUTO_OPSET, KEEP_OPSET
    if spelling in words:
        return spelling
    from onnx.defs import onnx_opset_version  # late: most conversions keep the opset of the model

    numbers = range(OLDEST_MOVED, onnx_opset_version() + 1)
    return _word_or_number(spelling, words, numbers, "cannot move a model to opset")


def _word_or_number(spelling: str | int, words: tuple[str, ...], numbers: range, what: str) -> str | int:
    word = str(spelling).strip().lower()
    if word in words:
        return word
    if word not in map(str, numbers):
        legal = f"use {', '.join(words)} or a number from {numbers[0]} to {numbers[-1]}"
        raise PolicyError(f"{what} {spelling!r}; {legal}")
    return int(word)


HEADROOM = 2.0
"""The factor by which measured values may grow before they overflow the low type."""


def check_headroom(headroom: float) -> float:
    """Return the headroom; PolicyError unless it is a finite number above 1."""
    if not 1 < headroom < math.inf:
        raise PolicyError(f"a headroom of {headroom:g} is not a finite number above 1; use a number such as 2")
    return headroom
