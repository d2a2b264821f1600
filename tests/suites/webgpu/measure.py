"""The measurement behind docs/evidence/webgpu.md: each op and each model on the device."""

import platform
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import ModelProto

import amp_rewrite
from amp_rewrite.decide.needs.find import sum_lengths
from amp_rewrite.dtypes import DType
from amp_rewrite.files.model import Model
from amp_rewrite.ir.view import View
from amp_rewrite.rewrite.emulate import emulate
from amp_rewrite.runtime.faults import CPU
from amp_rewrite.runtime.kernels import load_webgpu_kernels
from amp_rewrite.runtime.runner import WEBGPU
from suites.webgpu.op_cases import CASES, OpCase
from suites.webgpu.worker import Device
from support.paths import ROOT, TESTS
from support.rounded_products import relative_error

LEAST, FACTOR = 0.7, 8.0
"""The smallest and the largest error on the device in errors of the emulation: of an op, and of a converted fixture."""
_DIGITS = ROOT / "examples" / "models"

Feeds = dict[str, np.ndarray]
Row = dict[str, Any]


def measured(device: Device) -> dict[str, Any]:
    """All numbers of the page."""
    return {
        "device": "Mesa's software Vulkan device (lavapipe)",
        "onnxruntime": ort.__version__,
        "provider": load_webgpu_kernels().runtime,
        "machine": platform.machine(),
        "ops": [op_row(device, case) for case in CASES],
        "models": list(model_rows(device)),
    }


def op_row(device: Device, case: OpCase) -> Row:
    """The RMS error of an op on the device, beside that of the emulation."""
    feeds = case.feeds()
    wide = {name: array.astype(np.float32) for name, array in feeds.items()}
    reply = device.run(case.model(), feeds)
    right = device.run(case.widened(), wide, CPU)["outputs"]["y"]
    found = reply["outputs"]["y"]
    twin = device.run(whole(emulate(case.model(), io="float32")), wide, CPU)["outputs"]["y"]
    return {
        "op": case.op_type,
        "case": case.name,
        "on_device": case.op_type in reply["assignment"].get(WEBGPU, {}) or not reply["on_cpu"],
        "device": rms(found, right),
        "emulated": rms(twin, right),
        "factor": allowed(case),
    }


def allowed(case: OpCase) -> float:
    """The largest error of the device that is taken for right, in errors of the emulation, which sums in float32.

    For a product it is the root of its terms: the device rounds after each, and rounding errors add up as in a random
    walk.
    """
    terms = sum(sum_lengths(View.of(Model.load(case.widened()))).values())
    return float(max(FACTOR, terms**0.5))


def model_rows(device: Device) -> Iterator[Row]:
    """Each model, converted for the device: its error there, the emulation's, and floats on the CPU."""
    for name, path, feeds in fixtures():
        source = whole(Model.load(path))
        right = list(device.run(source, feeds, CPU)["outputs"].values())
        yield {"model": name, **model_row(device, path, feeds, right)}


def model_row(device: Device, path: Path, feeds: Feeds, right: list[np.ndarray]) -> Row:
    """A model that is converted for the device, there."""
    converted = amp_rewrite.convert(path, target="webgpu")
    proto = whole(converted.result)
    reply = device.run(proto, feeds)
    if "error" in reply:
        return {"error": reply["error"]}
    twin = whole(emulate(proto, io="float32"))
    row: Row = {
        "device": error(list(reply["outputs"].values()), right),
        "emulated": error(list(device.run(twin, feeds, CPU)["outputs"].values()), right),
    }
    kept = converted.coloring
    counted = sum_lengths(converted.view).items()
    terms = sum(n for op, n in counted if (paint := kept.of(op)) is not None and paint.dtype is DType.FLOAT16)
    view = View.of(Model.load(proto))
    low = [op for op in view.ops if op.outputs and view.dtype(op.outputs[0]) is DType.FLOAT16 and op.kind != "Cast"]
    counts = reply["assignment"]
    return row | {
        "low_ops": len(low),
        "terms": terms,
        "device_nodes": sum(counts.get(WEBGPU, {}).values()),
        "cpu_nodes": sum(counts.get(CPU, {}).values()),
        "cpu_floats": sorted(floats_on_cpu(view, reply["on_cpu"])),
    }


def floats_on_cpu(view: View, on_cpu: Collection[str]) -> set[str]:
    """The kinds of ops that read or make floats, of those whose nodes are on the CPU by name."""
    named = (op for op in view.ops if op.name in on_cpu)
    return {op.kind for op in named if any((t := view.dtype(value)) is not None and t.floating for value in op.ports)}


# -- the models that run on the device: the exported fixtures and the shipped ones ----------------------------


def fixtures() -> Iterator[tuple[str, Path, Feeds]]:
    """Name, file and inputs of each model."""
    with np.load(_DIGITS / "digits_test.npz") as stored:
        images = stored["x"][:8]
    for path in sorted(_DIGITS.glob("*.onnx")):
        yield path.stem, path, {"image": images}
    for path in sorted((TESTS / "models").glob("*.onnx")):
        with np.load(path.with_suffix(".npz")) as stored:
            feeds = {key.removeprefix("input/"): stored[key] for key in stored.files if key.startswith("input/")}
        yield path.stem, path, feeds


def whole(model: Model) -> ModelProto:
    """A model in memory, its weights too."""
    proto: ModelProto = model.to_proto()
    return onnx.load_from_string(proto.SerializeToString())


def error(found: list[np.ndarray], expected: list[np.ndarray]) -> float:
    """The largest difference of a float output, of its largest float32 value; infinite where one side alone is so."""
    floats = [at for at, array in enumerate(expected) if array.dtype.kind == "f"]
    return relative_error([expected[at] for at in floats], [found[at] for at in floats])


def rms(found: np.ndarray, expected: np.ndarray) -> float:
    """The root of the mean squared difference, over what is finite on both sides."""
    wide, right = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    held = np.isfinite(wide) & np.isfinite(right)
    return float(np.sqrt(np.mean((wide - right)[held] ** 2))) if held.any() else 0.0
