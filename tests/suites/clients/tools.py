"""The tools that people run beside a conversion, each as a function from a file to a file."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import onnx

from support.quantized_models import batches, quantize_to

Apply = Callable[[Path, Path, Path], None]
"""Read the model of the first path and write the second; the third is the shipped model that it came from."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool. `package` as pip names it; `modules`: what must be importable, with spaces between.

    `quantizes`: it gives a quantized model.
    """

    name: str
    package: str
    modules: str
    apply: Apply
    quantizes: bool = False

    @property
    def installed(self) -> bool:
        try:
            return all(find_spec(module) is not None for module in self.modules.split())
        except ModuleNotFoundError:  # of a package around it
            return False


def _onnxslim(model: Path, out: Path, shipped: Path) -> None:
    import onnxslim

    onnx.save(onnxslim.slim(onnx.load(model)), out)


def _onnxsim(model: Path, out: Path, shipped: Path) -> None:
    import onnxsim

    simplified, agrees = onnxsim.simplify(onnx.load(model))
    if not agrees:
        raise ValueError("onnxsim.simplify: its own check fails")
    onnx.save(simplified, out)


def _graphsurgeon(model: Path, out: Path, shipped: Path) -> None:
    import onnx_graphsurgeon

    graph = onnx_graphsurgeon.import_onnx(onnx.load(model))
    graph.fold_constants().cleanup().toposort()
    onnx.save(onnx_graphsurgeon.export_onnx(graph), out)


def _onnxscript(model: Path, out: Path, shipped: Path) -> None:
    from onnxscript import optimizer

    onnx.save(optimizer.optimize(onnx.load(model)), out)


def _version_converter(model: Path, out: Path, shipped: Path) -> None:
    from onnx import version_converter

    loaded = onnx.load(model)
    opset = next(entry.version for entry in loaded.opset_import if entry.domain == "")
    onnx.save(version_converter.convert_version(loaded, next(n for n in NEWER if n > opset)), out)


NEWER = (18, 21, 23, 24)
"""The opset that a model is raised to is the first of these above its own."""


def _quantize_dynamic(model: Path, out: Path, shipped: Path) -> None:
    from onnxruntime import quantization
    from onnxruntime.quantization.registry import CommonOpsRegistry, IntegerOpsRegistry

    loaded = onnx.load(model)
    del loaded.graph.value_info[:]  # it turns weights of Gemm and then objects to their stated shapes
    # It takes ai.onnx's Attention for the contrib operator of that name.
    kinds = sorted({*CommonOpsRegistry, *IntegerOpsRegistry} - {"Attention"})
    quantization.quantize_dynamic(loaded, out, op_types_to_quantize=kinds)


def _quantize_static(model: Path, out: Path, shipped: Path) -> None:
    quantize_to(model, out, batches(shipped))


def _session_optimizer(level: str) -> Apply:
    def apply(model: Path, out: Path, shipped: Path) -> None:
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, f"ORT_ENABLE_{level}")
        options.optimized_model_filepath = str(out)
        options.log_severity_level = 4
        ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])

    return apply


FAMILIES = {"gpt2": "gpt2", "vit": "vit", "t5": "t5", "unet": "unet", "whisper": "bart"}
"""What onnxruntime calls the families of models, by how their names begin here; others are taken for BERT."""


def _transformers_optimizer(model: Path, out: Path, shipped: Path) -> None:
    from onnxruntime.transformers import fusion_options, optimizer

    family = next((kind for start, kind in FAMILIES.items() if start in shipped.stem), "bert")
    options = fusion_options.FusionOptions(family)
    options.enable_nhwc_conv = False  # NhwcConv has a kernel on CUDA alone, and these models run on the CPU
    optimizer.optimize_model(str(model), family, optimization_options=options, opt_level=0).save_model_to_file(str(out))


RUNTIME = "onnxruntime" if sys.platform == "darwin" else "onnxruntime-gpu"
TOOLS = {
    tool.name: tool
    for tool in (
        Tool("onnxslim", "onnxslim", "onnxslim", _onnxslim),
        Tool("onnxsim", "onnxsim", "onnxsim", _onnxsim),
        Tool("onnx-graphsurgeon", "onnx-graphsurgeon", "onnx_graphsurgeon", _graphsurgeon),
        Tool("onnxscript optimizer", "onnxscript", "onnxscript", _onnxscript),
        Tool("onnx version_converter", "onnx", "onnx", _version_converter),
        Tool("onnxruntime quantize_dynamic", RUNTIME, "onnxruntime.quantization", _quantize_dynamic, quantizes=True),
        Tool("onnxruntime quantize_static", RUNTIME, "onnxruntime.quantization", _quantize_static, quantizes=True),
        Tool("onnxruntime session BASIC", RUNTIME, "onnxruntime", _session_optimizer("BASIC")),
        Tool("onnxruntime session EXTENDED", RUNTIME, "onnxruntime", _session_optimizer("EXTENDED")),
        Tool("onnxruntime transformers optimizer", RUNTIME, "onnxruntime.transformers sympy", _transformers_optimizer),
    )
}
"""The tools, by name."""
