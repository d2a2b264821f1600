"""Ops that runtimes run on integers, between DequantizeLinear and QuantizeLinear."""

from __future__ import annotations

from collections.abc import Iterator

from amp_rewrite.decide import reasons
from amp_rewrite.decide.hazards.rule import HeldOp, rule
from amp_rewrite.decide.hazards.steps import described
from amp_rewrite.dtypes import DType
from amp_rewrite.ir.patterns.integers import integer_ops
from amp_rewrite.ir.view import View


@rule(reasons.QUANTIZED, "An op between DequantizeLinear and QuantizeLinear stays as it is.")
def quantized(view: View, to: DType) -> Iterator[HeldOp]:
    """Hold the ops that runtimes run on integers, and the copies between them and their quantizers. O(nodes + uses).

    What it protects: Ops that read their activations from DequantizeLinear and hand their results to QuantizeLinear;
        products and convolutions of dequantized activations and weights, whichever ops read them.
    Why: onnxruntime and TensorRT replace such a group by one integer kernel. With a Cast between DequantizeLinear and
        the op they do not recognize it, and run all of it in floats.
    Example: A convolution of a model that `onnxruntime.quantization.quantize_static` wrote.
    How to override: `--set quantized=rescale` gives the quantizers scales of the low type instead.
    Source: onnxruntime, "Quantize ONNX models", section "QDQ"; TensorRT, "Working with quantized types".
    """
    for op_id, cause in integer_ops(view).items():
        passed = f"on the way of {described(view, cause)}, which runs on integers"
        yield HeldOp(op_id, None, "") if cause == op_id else HeldOp(op_id, cause, passed)
