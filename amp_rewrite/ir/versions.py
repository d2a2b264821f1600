"""Facts about ai.onnx opsets and IR versions: the first version of each.

`files` precedes this wing and names its own: `files.loading.FIRST_IR_WITH_OPSET_IMPORTS`, and the opset of sparse
Constants in `files.skeleton`. All other facts are in the kernel tables and in onnx's schemas.
"""

from __future__ import annotations

from collections.abc import Mapping

FIRST_IR_WITH_FREE_INITIALIZERS = 4  # an initializer need not be an input; as an input it is the default
FIRST_CAST_BY_CODE = 6  # Cast states its type as a number; before, as a word
FIRST_WHERE = 9
FIRST_UNBATCHED_SCAN = 9  # Scan has no batch axis, and no `sequence_lens` before its other inputs
FIRST_INFERENCE_BATCH_NORM = 9  # the statistics of BatchNormalization are per channel only
FIRST_CLIP_WITH_INPUTS = 11  # Clip takes its bounds as inputs; before, they are attributes
FIRST_PAD_WITH_INPUTS = 11  # Pad takes its sizes and its fill as inputs; before, they are attributes
FIRST_RESIZE_WITH_REGION = 11
FIRST_AXES_INPUT = 13  # Squeeze, Unsqueeze, Split and ReduceSum take axes and sizes as inputs
FIRST_REDUCTION_AXES_INPUT = 18  # the other reductions do
FIRST_NUM_OUTPUTS = 18  # Split without sizes states the number of its outputs
FIRST_BFLOAT16_CAST = 13
FIRST_ROW_SOFTMAX = 13  # Softmax is over one axis, by default the last; before, it flattens its input to a matrix
FIRST_LOW_SCALES = 19  # QuantizeLinear and DequantizeLinear take scales of float16 and bfloat16
FIRST_ALLOWZERO = 14  # Reshape has `allowzero`, and onnx infers shapes through what a Reshape reads
FIRST_SCATTER_ADD = 16  # ScatterElements and ScatterND can add up elements of one position
FIRST_FUSED: Mapping[str, int] = {
    "Attention": 23,
    "Gelu": 20,
    "LayerNormalization": 17,
    "RMSNormalization": 23,
    "Softmax": FIRST_ROW_SOFTMAX,
}
"""The opset from which ONNX has an operator for what older models write out op by op."""
FIRST_STASHED: Mapping[str, int] = {"GroupNormalization": 21}
"""The opset from which the function body of an operator casts to a type of its own and back."""
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
"""The opsets at which an operator changes its meaning: scale per group instead of per channel, another default, modes
with other names, one axis instead of all from one on, other inputs."""
OLDEST_SOURCE = 7  # the oldest opset that a model is moved from: before, attributes broadcast operands
OLDEST_MOVED = 13  # the oldest that a model is moved to: the first with bfloat16, and with most float16 kernels
NEWEST_MOVED = 24  # the newest that a model is moved to unasked: that of the kernel table
