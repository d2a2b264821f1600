"""The measurements of docs/evidence/webgpu.md: each op and each model on the device."""

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
"""The smallest and largest allowed error of an op or a model on the device, in multiples of the emulated error."""
_DIGITS = ROOT / "examples" / "models"

Feeds = dict[str, np.ndarray]
Row = dict[str, Any]


def measured(device: Device) -> dict[str, Any]:
    """Measure all numbers of the page."""
    return {
        "device": "Mesa's software Vulkan device (lavapipe)",
        "onnxruntime": ort.__version__,
        "provider": load_webgpu_kernels().runtime,
        "machine": platform.machine(),
        "ops": [op_row(device, case) for case in CASES],
        "models": list(model_rows(device)),
    }


def op_row(device: Device, case: OpCase) -> Row:
    """Measure the RMS error of an op on the device and under emulation."""
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
    """Return the largest allowed error on the device, in multiples of the emulated one, which sums in float32.

    For a product it is the root of its number of terms: the device rounds after each, and rounding errors add up as in
    a random walk.
    """
    terms = sum(sum_lengths(View.of(Model.load(case.widened()))).values())
    return float(max(FACTOR, terms**0.5))


def model_rows(device: Device) -> Iterator[Row]:
    """Yield the row of each model."""
    for name, path, feeds in fixtures():
        source = whole(Model.load(path))
        right = list(device.run(source, feeds, CPU)["outputs"].values())
        yield {"model": name, **model_row(device, path, feeds, right)}


def model_row(device: Device, path: Path, feeds: Feeds, right: list[np.ndarray]) -> Row:
    """Measure a model converted for the device: its error there and under emulation, and floats on the CPU."""
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
    coloring = converted.coloring
    counted = sum_lengths(converted.view).items()
    terms = sum(n for op, n in counted if (paint := coloring.of(op)) is not None and paint.dtype is DType.FLOAT16)
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
    """Return the kinds of float ops among the named nodes on the CPU."""
    named = (op for op in view.ops if op.name in on_cpu)
    return {op.kind for op in named if any((t := view.dtype(value)) is not None and t.floating for value in op.ports)}


# -- models ---------------------------------------------------------------------------------------------------


def fixtures() -> Iterator[tuple[str, Path, Feeds]]:
    """Yield name, file and inputs of each exported model and each example."""
    with np.load(_DIGITS / "digits_test.npz") as stored:
        images = stored["x"][:8]
    for path in sorted(_DIGITS.glob("*.onnx")):
        yield path.stem, path, {"image": images}
    for path in sorted((TESTS / "models").glob("*.onnx")):
        with np.load(path.with_suffix(".npz")) as stored:
            feeds = {key.removeprefix("input/"): stored[key] for key in stored.files if key.startswith("input/")}
        yield path.stem, path, feeds


def whole(model: Model) -> ModelProto:
    """Load a model with its weights into memory."""
    proto: ModelProto = model.to_proto()
    return onnx.load_from_string(proto.SerializeToString())


def error(found: list[np.ndarray], expected: list[np.ndarray]) -> float:
    """Return the largest error of the float outputs, each relative to its largest float32 value."""
    floats = [at for at, array in enumerate(expected) if array.dtype.kind == "f"]
    return relative_error([expected[at] for at in floats], [found[at] for at in floats])


def rms(found: np.ndarray, expected: np.ndarray) -> float:
    """Return the RMS difference over elements that are finite on both sides."""
    wide, right = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    finite = np.isfinite(wide) & np.isfinite(right)
    return float(np.sqrt(np.mean((wide - right)[finite] ** 2))) if finite.any() else 0.0
