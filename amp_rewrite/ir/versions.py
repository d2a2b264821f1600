"""Facts about ai.onnx opsets and IR versions: the first version of each.

`files` precedes this wing and names its own: `files.loading.FIRST_IR_WITH_OPSET_IMPORTS`, and the opset of sparse
Constants in `files.skeleton`. All other facts are in the kernel tables and in onnx's schemas.
"""

from __future__ import annotations

from collections.abc import Mapping

FIRST_IR_WITH_FREE_INITIALIZERS = 4
"""The IR version from which an initializer need not be an input; as an input it is the default."""
FIRST_CAST_BY_CODE = 6
"""The opset from which Cast states its type as a number; before, as a word."""
FIRST_WHERE = 9
"""The opset from which Where exists."""
FIRST_UNBATCHED_SCAN = 9
"""The opset from which Scan has no batch axis and no `sequence_lens` before its other inputs."""
FIRST_INFERENCE_BATCH_NORM = 9
"""The opset from which the statistics of BatchNormalization are per channel only."""
FIRST_CLIP_WITH_INPUTS = 11
"""The opset from which Clip takes its bounds as inputs; before, they are attributes."""
FIRST_PAD_WITH_INPUTS = 11
FIRST_RESIZE_WITH_REGION = 11
"""The opset from which Pad takes its sizes and its fill as inputs; before, they are attributes."""
FIRST_AXES_INPUT = 13
"""The opset from which Squeeze, Unsqueeze, Split and ReduceSum take axes and sizes as inputs."""
FIRST_REDUCTION_AXES_INPUT = 18
"""The opset from which the other reductions take axes as an input."""
FIRST_NUM_OUTPUTS = 18
"""The opset from which Split without sizes states the number of its outputs."""
FIRST_BFLOAT16_CAST = 13
"""The opset from which Cast knows bfloat16."""
FIRST_ROW_SOFTMAX = 13
"""The opset from which Softmax is over one axis, by default the last; before, it flattens its input to a matrix."""
FIRST_LOW_SCALES = 19
"""The opset from which QuantizeLinear and DequantizeLinear take scales of float16 and bfloat16."""
FIRST_ALLOWZERO = 14
"""The opset from which Reshape has `allowzero`, and from which onnx infers shapes through what a Reshape reads."""
FIRST_SCATTER_ADD = 16
"""The opset from which ScatterElements and ScatterND can add up elements of one position."""
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
OLDEST_SOURCE = 7
"""The oldest opset that a model is moved from: before, attributes broadcast the operands of sums and products."""
OLDEST_MOVED = 13
"""The oldest opset that a model is moved to: the first with bfloat16, and with float16 kernels for most operators."""
NEWEST_MOVED = 24
"""The newest opset that a model is moved to unasked: that of the kernel table."""
