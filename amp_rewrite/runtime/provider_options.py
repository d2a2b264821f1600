"""Options of onnxruntime's CUDA provider by model: TF32, and channels last for convolutions.

Without TF32 onnxruntime gives convolutions no tensor cores, those in a low type neither (`untensored_convolution` in
`faults.py`). With channels last and a fused bias, convolutional networks spare the changes of layout around each
kernel; the bias cannot be fused without channels last.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import ModelError, count
from amp_rewrite.files.model import Model
from amp_rewrite.ir.shapes import shape_of
from amp_rewrite.ir.view import ValueId, View
from amp_rewrite.runtime.faults import CUDA, FAULTS, Made, float32_products, low_convolutions

CHANNELS_LAST: Mapping[str, str] = {"prefer_nhwc": "1", "fuse_conv_bias": "1"}
_LEAST = 8
"""From so many convolutions on a network is convolutional; one or two only cut an image or a sound into patches."""
_IMAGE = 4
"""Rank of the weight of a convolution in two dimensions."""


@dataclass(frozen=True, slots=True)
class CudaOptions:
    """Options of the CUDA provider for a model.

    `tf32`: True if no float32 product is left for TF32 to shorten. `channels_last`: convolutions are worth a try with
    channels last. `cost`: the price of leaving TF32 off, and the way out; "" for none.
    """

    tf32: bool = False
    channels_last: bool = False
    cost: str = ""

    @property
    def stated(self) -> dict[str, str]:
        """Return the options without those of the layout."""
        return {"use_tf32": str(int(self.tf32))}

    @property
    def line(self) -> str:
        """Return the Python of a session with all of the options; "" for the defaults of onnxruntime."""
        if not self.channels_last:
            return ""
        options = ", ".join(f'"{name}": {value}' for name, value in CHANNELS_LAST.items())
        return f'InferenceSession(path, providers=[("{CUDA}", {{{options}}}), "CPUExecutionProvider"])'


def cuda_options(model: Model) -> CudaOptions:
    """Return the options for a model. O(nodes); cautious ones for functions and for an invalid model."""
    try:
        view = View.of(model)
    except ModelError:
        return CudaOptions()
    return cuda_options_of(view, view.dtype)


def cuda_options_of(view: View, made: Made) -> CudaOptions:
    """Return the options for a model with values of the types in `made`."""
    if view.model.proto.functions:
        return CudaOptions()
    low = list(low_convolutions(view, made))
    if next(float32_products(view, made), None) is not None:
        cost = f"{count(len(low), 'convolution')} in a low type run without tensor cores, {_COST}" if low else ""
        return CudaOptions(cost=cost)
    images = sum(made(op.results[0]) is DType.FLOAT16 and _rank(view, op.inputs[1]) == _IMAGE for op in low)
    return CudaOptions(tf32=True, channels_last=images >= _LEAST)


_COST = "since float32 products beside them need TF32 off; " + next(
    fault.remedy for fault in FAULTS if fault.name == "untensored_convolution"
)


def _rank(view: View, value: ValueId | None) -> int | None:
    shape = None if value is None else shape_of(view, value)
    return None if shape is None else len(shape)
