"""The first ai.onnx opsets and IR versions with the features used here.

`files` does not import this module and has its own constants: `files.loading.FIRST_IR_WITH_OPSET_IMPORTS`, and the
opset of sparse Constants in `files.skeleton`. All other versions are in the kernel tables and onnx's schemas.
"""

from __future__ import annotations

from collections.abc import Mapping

FIRST_IR_WITH_FREE_INITIALIZERS = 4  # an initializer need not be an input; if it is, it is the default value
FIRST_CAST_BY_CODE = 6  # Cast takes its type as a number; before, as a string
FIRST_WHERE = 9
FIRST_UNBATCHED_SCAN = 9  # Scan has no batch axis, and no `sequence_lens` before its other inputs
FIRST_INFERENCE_BATCH_NORM = 9  # the statistics of BatchNormalization are always per channel
FIRST_CLIP_WITH_INPUTS = 11  # the bounds of Clip are inputs; before, attributes
FIRST_PAD_WITH_INPUTS = 11  # the sizes and the fill of Pad are inputs; before, attributes
FIRST_RESIZE_WITH_REGION = 11
FIRST_AXES_INPUT = 13  # Squeeze, Unsqueeze, Split and ReduceSum take axes and sizes as inputs
FIRST_REDUCTION_AXES_INPUT = 18  # the other reductions take axes as an input
FIRST_NUM_OUTPUTS = 18  # Split without sizes has `num_outputs`
FIRST_BFLOAT16_CAST = 13
FIRST_ROW_SOFTMAX = 13  # Softmax is over one axis, by default the last; before, it flattens its input to a matrix
FIRST_LOW_SCALES = 19  # QuantizeLinear and DequantizeLinear accept float16 and bfloat16 scales
FIRST_ALLOWZERO = 14  # Reshape has `allowzero`, and onnx infers shapes through the shape input of Reshape
FIRST_SCATTER_ADD = 16  # ScatterElements and ScatterND can add to the elements
FIRST_FUSED: Mapping[str, int] = {
    "Attention": 23,
    "Gelu": 20,
    "LayerNormalization": 17,
    "RMSNormalization": 23,
    "Softmax": FIRST_ROW_SOFTMAX,
}
"""The first opset with an operator for a computation otherwise written out op by op."""
FIRST_STASHED: Mapping[str, int] = {"GroupNormalization": 21}
"""The first opset in which the function body of an operator casts to the type in `stash_type` and back."""
MEANING_CHANGES: Mapping[str, tuple[int, ...]] = {
    "Attention": (24,),
    "DFT": (20,),
    "GridSample": (20,),
    "GroupNormalization": (21,),
    "Hardmax": (FIRST_ROW_SOFTMAX,),
    "LogSoftmax": (FIRST_ROW_SOFTMAX,),
    "Resize": (FIRST_RESIZE_WITH_REGION,),
    "RoiAlign": (16,),
    "Scan": (FIRST_UNBATCHED_SCAN,),
    "Softmax": (FIRST_ROW_SOFTMAX,),
}
"""The opsets at which the meaning of an operator changes: scale per channel instead of per group, another default,
renamed modes, one axis instead of all later axes, other inputs."""
OLDEST_SOURCE = 7  # the oldest opset that a model is moved from; before, attributes control broadcasting
OLDEST_MOVED = 13  # the oldest that a model is moved to, the first with bfloat16 and most float16 kernels
NEWEST_MOVED = 24  # the newest that a model is moved to by default, the opset of the kernel table
