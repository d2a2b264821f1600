"""Choices of a conversion: target, safety rules, placement, fusion, opset, headroom."""

from __future__ import annotations

import math
from enum import Enum
from typing import TYPE_CHECKING, Literal, Self, cast

from amp_rewrite.errors import PolicyError, advice
from amp_rewrite.ir.versions import OLDEST_MOVED

if TYPE_CHECKING:
    from amp_rewrite.files.model import Model
    from amp_rewrite.runtime.faults import RuntimeTarget
    from amp_rewrite.runtime.kernels import Kernels, Limits

# Words of the choices, for static checkers and completion.
LevelName = Literal["default", "tensor-cores-only", "treat-gray-as-deny", "unsafe-force-all", "lower-all"]
TargetName = Literal["ort-cuda", "onnx", "tensorrt", "directml", "openvino", "coreml", "qnn", "webgpu"]
SafetyName = Literal["default", "none"]
QuantizedName = Literal["keep", "rescale"]
FuseName = Literal["auto", "none", "basic", "contrib"]
PlacementName = Literal["mincut", "propagate"]


class _Choice(Enum):
    @classmethod
    def parse(cls, spelling: str | Self) -> Self:
        """Return the member of a name, in any case, with "_" or "-"; PolicyError for an unknown name."""
        if isinstance(spelling, cls):
            return spelling
        try:
            return cls(str(spelling).strip().lower().replace("_", "-"))
        except ValueError:
            legal = [str(member.value) for member in cls]
            hint = advice(spelling, legal, f"use one of {', '.join(legal)}")
            raise PolicyError(f"unknown value {spelling!r} for {cls.__name__.lower()}; {hint}") from None


class Level(_Choice):
    """Extent of the conversion; the first four levels are TensorFlow's."""

    DEFAULT = "default"
    TENSOR_CORES_ONLY = "tensor-cores-only"
    TREAT_GRAY_AS_DENY = "treat-gray-as-deny"
    UNSAFE_FORCE_ALL = "unsafe-force-all"
    LOWER_ALL = "lower-all"

    @classmethod
    def _missing_(cls, value: object) -> Level | None:
        return cls.TREAT_GRAY_AS_DENY if value == "treat-infer-as-deny" else None  # TensorFlow's name for it


class Target(_Choice):
    """Runtime of the result: the judge of legal types.

    `ORT_CUDA`: onnxruntime's CUDA provider; an op is lowered only if a kernel runs its joint type assignment.
    `ONNX`: the schema alone decides. `WEBGPU`: onnxruntime's WebGPU provider, by its kernels; the longest sums stay
    float32. For all others the schema decides, all float types of an op are one, and what the runtime's documentation
    excludes stays float32 (docs/reference/targets.md).

    A member names the runtime. `parse` also makes targets of one release ("ort-cuda:1.22", "tensorrt:11.2"), which have
    the same `family`.

    Args:
        family: the word of the runtime.
    """

    ORT_CUDA = "ort-cuda"
    ONNX = "onnx"
    TENSORRT = "tensorrt"
    DIRECTML = "directml"
    OPENVINO = "openvino"
    COREML = "coreml"
    QNN = "qnn"
    WEBGPU = "webgpu"

    _release: str
    _family: str

    def __init__(self, family: str) -> None:
        self._release, self._family = "", family

    @classmethod
    def _missing_(cls, value: object) -> Target | None:
        word = str(value)
        name, colon, release = word.partition(":")
        if not colon:
            words = {"cuda": cls.ORT_CUDA, "gpu": cls.ORT_CUDA, "trt": cls.TENSORRT, "dml": cls.DIRECTML}
            return words.get(word)
        return cls._of(cls(name), release)

    @classmethod
    def parse(cls, spelling: str | Self) -> Self:
        """Return the target of a word, in any case, or of a word with a release ("ort-cuda:1.22", "tensorrt:11.2").

        Raises:
            PolicyError: the word or the release is unknown.
        """
        name, colon, release = str(spelling).partition(":") if isinstance(spelling, str) else ("", "", "")
        return cls._of(super().parse(name), release.strip() or "none") if colon else super().parse(spelling)  # type: ignore[arg-type]

    @classmethod
    def _of(cls, family: Self, release: str) -> Self:
        """Return the target of a release; PolicyError for an unknown one, and for runtimes without releases."""
        if family is cls.ORT_CUDA:
            from amp_rewrite.runtime.kernels import known_release, release_number, releases  # late: few state one

            served = known_release(release)
            exact = release_number(served)[: len(release_number(release))] == release_number(release)
            return cls._made(family, served if exact and served in releases() else release)
        if family is not cls.TENSORRT or release.partition(".")[0] not in ("10", "11"):
            known = "ort-cuda:1.22, tensorrt:10 and tensorrt:11.2 are"
            raise PolicyError(f"unknown release {release!r} of target {family.value}; {known} targets of a release")
        return cls._made(family, release)

    @classmethod
    def _made(cls, family: Self, release: str) -> Self:
        """Return a target besides the members, as `enum.Flag` makes combinations; one of a release is single."""
        value = f"{family.value}:{release}"
        if value in cls._value2member_map_:
            return cast(Self, cls._value2member_map_[value])
        target = object.__new__(cls)
        target._name_, target._value_ = f"{family.name}:{release}", value
        target._release, target._family = release, family.value
        cls._value2member_map_[value] = target
        return target

    @property
    def release(self) -> str:
        """The release of the runtime; "" for the newest known one."""
        return self._release

    @property
    def family(self) -> Target:
        """The member of the runtime, for any release."""
        return Target(self._family)

    @property
    def kernels(self) -> Kernels | None:
        """The kernel table of the target; None for a runtime of unknown kernels."""
        if self.family not in (Target.ORT_CUDA, Target.WEBGPU):
            return None
        from amp_rewrite.runtime.kernels import (  # late: not every command converts
            known_release,
            load_kernels,
            load_webgpu_kernels,
        )

        if self.family is Target.WEBGPU:
            return load_webgpu_kernels()
        return load_kernels(known_release(self.release) if self.release else "")

    @property
    def limits(self) -> Limits | None:
        """Limits in the documentation of the runtime; None for onnxruntime's CUDA provider and for ONNX."""
        from amp_rewrite.runtime.kernels import LIMITS  # late: not every command converts

        return LIMITS.get(self._family)

    @property
    def aim(self) -> RuntimeTarget:
        """The target as the table of faults knows it."""
        from amp_rewrite.runtime.faults import (  # late: as above
            CPU,
            CUDA,
            DIRECTML,
            ONNXRUNTIME,
            TENSORRT,
            WEBGPU,
            RuntimeTarget,
        )

        family, kernels = self.family, self.kernels
        if kernels is not None and family is not Target.WEBGPU:
            return RuntimeTarget(ONNXRUNTIME, kernels.runtime.rpartition(" ")[2])
        runtime = {Target.TENSORRT: TENSORRT, Target.DIRECTML: DIRECTML}.get(family)
        return (
            RuntimeTarget(ONNXRUNTIME, providers=(None, CPU, *([WEBGPU] if family is Target.WEBGPU else [])))
            if runtime is None
            else RuntimeTarget(runtime, self.release, (None, CUDA))
        )

    @property
    def opset(self) -> int | None:
        """The newest ai.onnx opset of the runtime; None if unknown."""
        known = self.kernels or self.limits
        return None if known is None else known.opset


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
"""Targets by execution provider of onnxruntime."""
METADATA_KEY = "amp_rewrite"
"""Key of the metadata entry of a converted model: version, type, lists and settings."""
KEEP_KEY = "amp_rewrite.keep"
"""Key of the metadata entry with the patterns of `keep`, one a line."""
NEEDS = "needs"
"""Word of that entry for the oldest release of onnxruntime that runs the model right, if only onnxruntime does."""


def stated_in(model: Model, word: str) -> str:
    """Return a word of the metadata entry of a conversion; "" without one."""
    entry = next((p.value for p in model.proto.metadata_props if p.key == METADATA_KEY), "")
    return next((held for name, _, held in (pair.partition("=") for pair in entry.split()) if name == word), "")


def target_of(model: Model) -> Target | None:
    """Return the target of a converted model; None for a model without one."""
    stated = stated_in(model, "target")
    if not stated:
        return None
    try:
        return Target.parse(stated)
    except PolicyError:  # of a later version
        return None


class Safety(_Choice):
    """Rules for numbers on top of the lists: this project's (`DEFAULT`), or none at all.

    `NONE` is TensorFlow's algorithm alone, also in the placement of Casts unless that is asked for.
    """

    DEFAULT = "default"
    NONE = "none"


class Quantized(_Choice):
    """Ops between DequantizeLinear and QuantizeLinear.

    `KEEP` leaves them as they are, so that runtimes find their integer kernels. `RESCALE` gives quantizers scales of
    the low type, and the ops between them that type, without Casts.
    """

    KEEP = "keep"
    RESCALE = "rescale"


class Placement(_Choice):
    """Method to find the border between the types.

    `MINCUT` moves the border that TensorFlow's rules leave to where it takes the fewest and smallest Casts;
    `PROPAGATE` leaves it.
    """

    MINCUT = "mincut"
    PROPAGATE = "propagate"


class Fuse(_Choice):
    """Fusions before painting: into operators of the standard (`BASIC`), of onnxruntime as well (`CONTRIB`), or none.

    `AUTO` is `CONTRIB` for onnxruntime's CUDA provider, and `BASIC` for other targets.
    """

    AUTO = "auto"
    NONE = "none"
    BASIC = "basic"
    CONTRIB = "contrib"

    def on(self, target: Target) -> Fuse:
        """Return the fusions of a target in place of `AUTO`."""
        if self is not Fuse.AUTO:
            return self
        return Fuse.CONTRIB if target.family is Target.ORT_CUDA else Fuse.BASIC


AUTO_SHIFT, NO_SHIFT = "auto", "none"
LARGEST_SHIFT = 24
"""Exponent of a shift beyond which float16 keeps nothing of what float32 tells apart."""

Shift = str | int


def parse_shift(spelling: Shift) -> Shift:
    """Return "auto", "none" or a number. PolicyError for other text, and for a useless exponent."""
    word = str(spelling).strip().lower()
    if word in (AUTO_SHIFT, NO_SHIFT) and isinstance(spelling, str):
        return word
    if not word.isdecimal() or not 1 <= int(word) <= LARGEST_SHIFT:
        hint = f"use auto, none or an exponent from 1 to {LARGEST_SHIFT}"
        raise PolicyError(f"cannot shift by {spelling!r}; {hint}")
    return int(word)


AUTO_OPSET, KEEP_OPSET = "auto", "keep"

Opset = str | int


def parse_opset(spelling: Opset) -> Opset:
    """Return "auto", "keep" or a number. PolicyError for other text, and for an opset out of reach."""
    if isinstance(spelling, str) and spelling in (AUTO_OPSET, KEEP_OPSET):
        return spelling
    from onnx.defs import onnx_opset_version  # late: most conversions stay at the opset of the model

    newest = onnx_opset_version()
    word = str(spelling)
    if not word.isdecimal() or not OLDEST_MOVED <= int(word) <= newest:
        raise PolicyError(
            f"cannot move a model to opset {spelling!r}; use auto, keep or a number from {OLDEST_MOVED} to {newest}"
        )
    return int(word)


HEADROOM = 2.0
"""Factor by which a value may grow before it leaves the range of the low type."""


def check_headroom(headroom: float) -> float:
    """Return the headroom. PolicyError unless it is a finite number above 1."""
    if not 1 < headroom < math.inf:
        raise PolicyError(f"a headroom of {headroom:g} leaves nothing to spare; use a number above 1, as in 2")
    return headroom
