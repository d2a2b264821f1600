"""Convert one model with another tool, in its own environment: `peer_tools TOOL IN OUT [DATA]`.

Models beyond 2 GiB are converted as each tool's documentation recommends. DATA is a .npz file with one array per input,
for the tools that take data.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def onnxconverter_common(source: str, target: str) -> None:
    from onnxconverter_common import float16

    if _large(source):
        _save(float16.convert_float_to_float16_model_path(source, keep_io_types=True), target)
    else:
        _save(float16.convert_float_to_float16(_load(source), keep_io_types=True), target)


def onnxconverter_common_auto(source: str, target: str, data: str) -> None:
    """Search for ops to block, by comparing with float32 on the CPU provider."""
    import numpy as np
    from onnxconverter_common.auto_mixed_precision import auto_convert_mixed_precision

    with np.load(data) as batch:
        feeds = dict(batch)
    _save(auto_convert_mixed_precision(_load(source), feeds, rtol=1e-2, atol=1e-2, keep_io_types=True), target)


def onnxruntime_float16(source: str, target: str) -> None:
    from onnxruntime.transformers.float16 import convert_float_to_float16
    from onnxruntime.transformers.onnx_model import OnnxModel

    # It puts Casts after their consumers: onnxruntime sorts nodes on loading, but other tools reject the model.
    model_or_path = source if _large(source) else _load(source)
    model = OnnxModel(convert_float_to_float16(model_or_path, keep_io_types=True))
    model.topological_sort()
    _save(model.model, target)


def onnxruntime_onnxmodel(source: str, target: str) -> None:
    """Use the class of onnxruntime's optimizer, which infers shapes outside the converter."""
    from onnxruntime.transformers.onnx_model import OnnxModel

    model = OnnxModel(_load(source))
    model.convert_float_to_float16(keep_io_types=True, use_symbolic_shape_infer=_large(source))
    model.topological_sort()
    _save(model.model, target)


def onnxruntime_optimizer(source: str, target: str, kind: str) -> None:
    """Follow onnxruntime's documentation: fusions for a model type, then float16."""
    from onnxruntime.transformers.optimizer import optimize_model

    model = optimize_model(source, model_type=kind, num_heads=0, hidden_size=0, opt_level=0, use_gpu=True)
    model.convert_float_to_float16(keep_io_types=True)
    model.topological_sort()
    _save(model.model, target)


def modelopt_autocast(source: str, target: str, data: str | None = None) -> None:
    from modelopt.onnx.autocast import convert_to_mixed_precision

    options = {"low_precision_type": "fp16", "keep_io_types": True, "calibration_data": data}
    _save(convert_to_mixed_precision(source, **options), target)


def modelopt_float16(source: str, target: str) -> None:
    """Use AutoCast without its node classifier: it runs nothing, and every op becomes float16."""
    from modelopt.onnx.autocast.convert import convert_to_f16

    _save(convert_to_f16(_load(source), keep_io_types=True), target)


def _large(source: str) -> bool:
    """Return True if the model exceeds protobuf's size limit."""
    external = Path(source + ".data")
    return external.exists() and external.stat().st_size >= 1 << 31


def _load(source: str) -> Any:
    import onnx

    return onnx.load(source)


def _save(model: Any, target: str) -> None:
    import onnx

    external = sum(len(t.raw_data) for t in model.graph.initializer) > 1_500_000_000
    onnx.save(model, target, save_as_external_data=external, location=Path(target).name + ".data")


TOOLS = (
    *(onnxconverter_common, onnxconverter_common_auto),
    *(onnxruntime_float16, onnxruntime_onnxmodel, onnxruntime_optimizer),
    *(modelopt_autocast, modelopt_float16),
)

if __name__ == "__main__":
    {tool.__name__: tool for tool in TOOLS}[sys.argv[1]](*sys.argv[2:])
