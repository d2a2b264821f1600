"""Choices of a conversion: target, safety rules, placement, fusion, opset, headroom."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Literal, Self

from amp_rewrite.errors import PolicyError, advice
from amp_rewrite.ir.versions import OLDEST_MOVED
from amp_rewrite.runtime.roofline import ROOFS, Roof

# Words of the choices, for static checkers and completion.
LevelName = Literal["default", "tensor-cores-only", "treat-gray-as-deny", "unsafe-force-all", "lower-all"]
TargetName = Literal["ort-cuda", "onnx", "tensorrt"]
SafetyName = Literal["default", "none"]
QuantizedName = Literal["keep", "rescale"]
FuseName = Literal["basic", "none", "contrib"]
PlacementName = Literal[
    "auto", "propagate", "mincut", "mincut:H200", "mincut:A100", "mincut:L4", "mincut:T4", "mincut:V100"
]


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
    """How far the conversion goes; the first four are TensorFlow's."""

    DEFAULT = "default"
    TENSOR_CORES_ONLY = "tensor-cores-only"
    TREAT_GRAY_AS_DENY = "treat-gray-as-deny"
    UNSAFE_FORCE_ALL = "unsafe-force-all"
    LOWER_ALL = "lower-all"

    @classmethod
    def _missing_(cls, value: object) -> Level | None:
        return cls.TREAT_GRAY_AS_DENY if value == "treat-infer-as-deny" else None  # TensorFlow's name for it


class Target(_Choice):
    """Runtime of the result, which decides what is legal.

    `ORT_CUDA`: onnxruntime's CUDA provider; an op is lowered only if a kernel runs its joint type assignment.
    `ONNX`: the schema alone decides. `TENSORRT`: the schema decides, and all float types of an op are one.
    """

    ORT_CUDA = "ort-cuda"
    ONNX = "onnx"
    TENSORRT = "tensorrt"

    @classmethod
    def _missing_(cls, value: object) -> Target | None:
        return {"cuda": cls.ORT_CUDA, "gpu": cls.ORT_CUDA, "trt": cls.TENSORRT}.get(str(value))


class Safety(_Choice):
    """Rules that protect numbers on top of the lists: this project's (`DEFAULT`), or none at all."""

    DEFAULT = "default"
    NONE = "none"


class Quantized(_Choice):
    """Ops between DequantizeLinear and QuantizeLinear.

    `KEEP` leaves them as they are, so that runtimes find their integer kernels. `RESCALE` gives quantizers scales of
    the low type, and the ops between them that type, without Casts.
    """

    KEEP = "keep"
    RESCALE = "rescale"


@dataclass(frozen=True, slots=True)
class Placement:
    """Method that finds the border between the types.

    With a GPU, it is the minimum cut over the costs of Casts, float32 and lost fusions on that GPU.

    Args:
        gpu: the GPU; None: spread colors as TensorFlow does.
        islands: keep ops of the allow list float32, too, where a low type gains less than its Casts cost.
    """

    gpu: Roof | None = None
    islands: bool = False

    @classmethod
    def parse(cls, spelling: str | Placement) -> Placement:
        """Return the placement of a word, in any case.

        Args:
            spelling: "auto" (the allow list is low), "mincut" (islands, too, for an A100), "mincut:GPU" or "propagate".

        Raises:
            PolicyError: the word is unknown.
        """
        if isinstance(spelling, Placement):
            return spelling
        name, colon, gpu = str(spelling).strip().partition(":")
        if name.lower() in ("auto", "propagate") and not colon:
            return AUTO if name.lower() == "auto" else PROPAGATE
        roof = next((roof for roof in ROOFS.values() if roof.gpu.lower() == (gpu.strip().lower() or _GPU)), None)
        if name.lower() != "mincut" or roof is None or (colon and not gpu.strip()):
            named = [f"mincut:{name}" for name in ROOFS]
            legal = f"use auto, propagate, mincut, or with a GPU {', '.join(named)}"
            hint = legal if colon else advice(spelling, ["auto", "propagate", "mincut"], legal)
            raise PolicyError(f"unknown value {spelling!r} for placement; {hint}")
        return cls(roof, islands=True)

    @property
    def spelling(self) -> str:
        """Text that `parse` reads back."""
        if self.gpu is None:
            return "propagate"
        return f"mincut:{self.gpu.gpu}" if self.islands else "auto"


_GPU = "a100"
PROPAGATE, AUTO = Placement(), Placement(ROOFS["A100"])


class Fuse(_Choice):
    """Fusions before painting."""

    NONE = "none"
    BASIC = "basic"
    CONTRIB = "contrib"


AUTO_SHIFT, NO_SHIFT = "auto", "none"
LARGEST_SHIFT = 24
"""Exponent of a shift beyond which float16 keeps nothing of what float32 tells apart."""

Shift = str | int


def parse_shift(spelling: Shift) -> Shift:
    """Return "auto", "none" or a number. PolicyError for other text, and for an exponent that leaves no digits."""
    word = str(spelling).strip().lower()
    if word in (AUTO_SHIFT, NO_SHIFT) and isinstance(spelling, str):
        return word
    number = int(word) if word.isdecimal() and not isinstance(spelling, bool) else 0
    if not 1 <= number <= LARGEST_SHIFT:
        hint = f"use auto, none or an exponent from 1 to {LARGEST_SHIFT}"
        raise PolicyError(f"cannot shift by {spelling!r}; {hint}")
    return number


AUTO_OPSET = "auto"

Opset = str | int


def parse_opset(spelling: Opset) -> Opset:
    """Return "auto" or a number. PolicyError for other text, and for an opset that no model can be moved to."""
    if isinstance(spelling, str) and spelling == AUTO_OPSET:
        return AUTO_OPSET
    from onnx.defs import onnx_opset_version  # late: most conversions stay at the opset of the model

    newest = onnx_opset_version()
    number = int(spelling) if isinstance(spelling, int) or str(spelling).isdecimal() else 0
    if not OLDEST_MOVED <= number <= newest:
        raise PolicyError(
            f"cannot move a model to opset {spelling!r}; use auto or a number from {OLDEST_MOVED} to {newest}"
        )
    return number


HEADROOM = 2.0
"""Factor by which a value may grow before it leaves the range of the low type."""


def check_headroom(headroom: float) -> float:
    """Return the headroom. PolicyError unless it is a finite number above 1."""
    if not 1 < headroom < math.inf:
        raise PolicyError(f"a headroom of {headroom:g} leaves nothing to spare; use a number above 1, as in 2")
    return headroom
