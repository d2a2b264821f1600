"""Element types of ONNX tensors, and the limits of the floating-point types."""

from __future__ import annotations

import math
import re
from enum import Enum
from numbers import Integral
from typing import TYPE_CHECKING, Any

from amp_rewrite.errors import PolicyError, advice

if TYPE_CHECKING:
    import numpy as np


class DType(Enum):
    """An ONNX element type; the value is its `TensorProto.DataType` code.

    Example:
        >>> from amp_rewrite import DType
        >>> DType.parse("half").max
        65504.0
    """

    FLOAT = 1
    UINT8 = 2
    INT8 = 3
    UINT16 = 4
    INT16 = 5
    INT32 = 6
    INT64 = 7
    STRING = 8
    BOOL = 9
    FLOAT16 = 10
    DOUBLE = 11
    UINT32 = 12
    UINT64 = 13
    COMPLEX64 = 14
    COMPLEX128 = 15
    BFLOAT16 = 16
    FLOAT8E4M3FN = 17
    FLOAT8E4M3FNUZ = 18
    FLOAT8E5M2 = 19
    FLOAT8E5M2FNUZ = 20
    UINT4 = 21
    INT4 = 22
    FLOAT4E2M1 = 23
    FLOAT8E8M0 = 24
    UINT2 = 25
    INT2 = 26

    # Plain attributes: hot paths read them several times per node, and a property of an Enum is slow.
    code: int
    """The `TensorProto.DataType` code."""
    spelling: str
    """The name in options and reports: "float32", "float16", "int64" …"""
    onnx_name: str
    """The name inside ONNX type strings such as "tensor(float)"."""
    floating: bool
    """True for the four floating-point types that a conversion may change."""
    low: bool
    """True for float16 and bfloat16, the targets of mixed precision."""
    bits: int
    """Bits per element; 0 for strings."""

    __hash__ = object.__hash__  # members are singletons; Enum's own hash runs Python code

    def nbytes(self, elements: int) -> int:
        """Return the size of this many elements in bytes; sub-byte types are packed, as in ONNX IR 10."""
        return (elements * self.bits + 7) // 8

    @property
    def max(self) -> float:
        """The largest finite value. ValueError unless the type is a floating-point type."""
        return self._limits()[0]

    @property
    def tiny(self) -> float:
        """The smallest positive normal value. ValueError unless the type is a floating-point type."""
        return self._limits()[1]

    @property
    def smallest_subnormal(self) -> float:
        """The smallest positive value. ValueError unless the type is a floating-point type."""
        return self.tiny * self.eps

    @property
    def eps(self) -> float:
        """The distance from 1.0 to the next value. ValueError unless the type is a floating-point type."""
        return self._limits()[2]

    @property
    def numpy(self) -> np.dtype[Any]:
        """The numpy dtype, from ml_dtypes if numpy has none. ValueError for strings."""
        import numpy as np

        if self is DType.STRING:
            raise ValueError("strings have no fixed-size numpy dtype")
        if self.code > DType.COMPLEX128.code:
            import ml_dtypes  # noqa: F401  registers the other types with numpy
        return np.dtype(_NUMPY.get(self, self.name.lower()))

    def _limits(self) -> tuple[float, float, float]:
        try:
            return _LIMITS[self]
        except KeyError:
            raise ValueError(f"{self.spelling} is not a floating-point type that the pass supports") from None

    @classmethod
    def of(cls, code: int) -> DType | None:
        """Return the type with an ONNX code; None for UNDEFINED and unknown codes."""
        return _BY_CODE.get(code)

    @classmethod
    def parse(cls, spelling: object) -> DType:
        """Return the type for a name, a dtype of another package, or an ONNX code.

        Args:
            spelling: "float16", "half", "bf16" …, a dtype of numpy, ml_dtypes or torch, or an ONNX code.

        Raises:
            PolicyError: the type is unknown.
        """
        if isinstance(spelling, cls):
            return spelling
        if isinstance(spelling, Integral) and not isinstance(spelling, bool):
            dtype = _BY_CODE.get(int(spelling))
        else:
            dtype = _PARSE.get(_type_name(spelling))
        if dtype is None:
            names = "use one of float16 (f16, fp16, half), bfloat16 (bf16), float32 (f32, float)"
            raise PolicyError(f"unknown element type {spelling!r}; {advice(_type_name(spelling), _PARSE, names)}")
        return dtype


def _type_name(spelling: object) -> str:
    """Return the type name in a string, a numpy dtype, a class such as np.float16, or a torch dtype."""
    if isinstance(spelling, str):
        return spelling.strip().lower()
    if type(spelling).__module__ == "torch":
        return str(spelling).removeprefix("torch.")
    import numpy as np

    if not isinstance(spelling, (type, np.dtype)):
        return ""
    try:
        return np.dtype(spelling).name.replace("_", "")
    except TypeError:
        return ""


# IEEE 754 binary16/32/64; bfloat16 is binary32 with the low 16 bits of the significand dropped.
_LIMITS: dict[DType, tuple[float, float, float]] = {
    DType.FLOAT16: (65504.0, 2.0**-14, 2.0**-10),
    DType.BFLOAT16: ((2.0 - 2.0**-7) * 2.0**127, 2.0**-126, 2.0**-7),
    DType.FLOAT: ((2.0 - 2.0**-23) * 2.0**127, 2.0**-126, 2.0**-23),
    DType.DOUBLE: (math.ldexp(2.0 - 2.0**-52, 1023), 2.0**-1022, 2.0**-52),
}
_SPELLING = {DType.FLOAT: "float32", DType.DOUBLE: "float64"}
LOW_TYPES = (DType.FLOAT16, DType.BFLOAT16)
"""The target types of a conversion."""
MIXED = {"mixed_float16": DType.FLOAT16, "mixed_bfloat16": DType.BFLOAT16}
"""Policies with float32 parameters and results, each with its computation type."""
_NUMPY = {
    DType.FLOAT: "float32",
    DType.DOUBLE: "float64",
    DType.FLOAT8E4M3FN: "float8_e4m3fn",
    DType.FLOAT8E4M3FNUZ: "float8_e4m3fnuz",
    DType.FLOAT8E5M2: "float8_e5m2",
    DType.FLOAT8E5M2FNUZ: "float8_e5m2fnuz",
    DType.FLOAT4E2M1: "float4_e2m1fn",
    DType.FLOAT8E8M0: "float8_e8m0fnu",
}
_BITS = {DType.STRING: 0, DType.BOOL: 8}
"""Numbers of bits that the names of the types do not contain."""
for _dtype in DType:
    _dtype.code = _dtype.value
    _dtype.onnx_name = _dtype.name.lower()
    _dtype.spelling = _SPELLING.get(_dtype, _dtype.onnx_name)
    _dtype.floating = _dtype in _LIMITS
    _dtype.low = _dtype in LOW_TYPES
    _dtype.bits = _BITS[_dtype] if _dtype in _BITS else int(re.findall("[0-9]+", _dtype.spelling)[0])
_BY_CODE = {d.code: d for d in DType}
_PARSE = {
    **{d.spelling: d for d in DType},
    "f16": DType.FLOAT16,
    "fp16": DType.FLOAT16,
    "half": DType.FLOAT16,
    "bf16": DType.BFLOAT16,
    "f32": DType.FLOAT,
    "fp32": DType.FLOAT,
    "float": DType.FLOAT,
    "f64": DType.DOUBLE,
    "double": DType.DOUBLE,
    **{name.replace("_", ""): d for d, name in _NUMPY.items()},  # names in ml_dtypes
}
