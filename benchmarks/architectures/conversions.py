"""Convert one exported model in many ways and run each result: `conversions MODEL [PEER.onnx ...]`.

It prints a JSON line for each way, flushed at once, so a crash affects only the current way. NAME.npz is next to
NAME.EXPORTER.onnx. All low precision is emulated. Errors are relative to the float32 model; onnxruntime's CPU provider
runs both.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as state

from amp_rewrite import AmpRewriteError, Model, View, convert, emulate

Array = np.ndarray[Any, Any]
Feeds = Mapping[str, Mapping[str, Array]]
FAULTS = (
    *(e for e in vars(state).values() if isinstance(e, type) and issubclass(e, Exception)),
    AmpRewriteError,
    onnx.checker.ValidationError,
    onnx.shape_inference.InferenceError,
)
COMPUTE = frozenset(
    (
        *("MatMul", "Gemm", "Conv", "ConvTranspose", "Einsum", "Attention", "LSTM", "GRU", "RNN"),
        *("com.microsoft::Attention", "com.microsoft::MultiHeadAttention", "com.microsoft::FusedMatMul"),
    )
)
# The options of each way.
WAYS: Mapping[str, Mapping[str, Any]] = {
    "float16": {},
    "bfloat16": {"to": "bfloat16"},
    "products": {"level": "tensor-cores-only", "fuse": "none"},
    "lower-all": {"level": "lower-all"},
    "force-all": {"level": "unsafe-force-all"},
    "fuse-none": {"fuse": "none"},
    "fuse-contrib": {"fuse": "contrib"},
    "opset-auto": {"opset": "auto"},
    "bfloat16-contrib": {"to": "bfloat16", "fuse": "contrib", "opset": "auto"},
}


def session(model: bytes) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    # This optimizer of onnxruntime 1.31.1 crashes on float16 recurrences.
    return onnxruntime.InferenceSession(
        model, options, providers=["CPUExecutionProvider"], disabled_optimizers=["NchwcTransformer"]
    )


def run(made: onnxruntime.InferenceSession, inputs: Mapping[str, Array]) -> list[Array]:
    kept = {i.name for i in made.get_inputs()}
    return made.run(None, {name: value for name, value in inputs.items() if name in kept})


def apart(found: list[Array], expected: list[Array]) -> tuple[float, float, int]:
    """Return the largest error relative to the largest output, the relative L2 error, and the count of lost numbers."""
    largest, l2, broken = 0.0, 0.0, 0
    for y, exact in zip(found, expected, strict=True):
        if exact.dtype.kind != "f" or not exact.size:
            continue
        if y.shape != exact.shape:  # an output's length may depend on numbers, such as predicted durations
            broken += exact.size
            continue
        y, exact = y.astype(np.float64), exact.astype(np.float64)
        real = np.isfinite(exact)
        broken += int(np.count_nonzero(~np.isfinite(y[real])))
        good = real & np.isfinite(y)
        if not good.any():
            continue
        difference = np.abs(y[good] - exact[good])
        largest = max(largest, float(difference.max() / max(np.abs(exact[real]).max(), 1e-30)))
        l2 = max(l2, float(np.linalg.norm(difference) / max(np.linalg.norm(exact[real]), 1e-30)))
    return largest, l2, broken


def errors(proto: bytes, feeds: Feeds, expected: Mapping[str, list[Array]]) -> dict[str, Any]:
    made = session(proto)
    return {batch: apart(run(made, inputs), expected[batch]) for batch, inputs in feeds.items()}


def counted(view: View) -> dict[str, Any]:
    """Count ops, products, low products, and Casts, except of constants, since runtimes fold them."""
    known = {value.id for value in view.values if value.tensor is not None and not value.overridable}
    for op in view.ops:
        if op.inputs and not op.bodies and all(value is None or value in known for value in op.inputs):
            known.update(value for value in op.outputs if value is not None)
    compute = [op for op in view.ops if op.kind in COMPUTE]
    typed = [view.dtype(v) for op in compute for v in op.inputs[:1] if v is not None]
    return {
        "nodes": len(view.ops),
        "casts": sum(op.kind == "Cast" and op.inputs[0] not in known for op in view.ops),
        "compute": sum(t is not None and t.floating for t in typed),
        "low": sum(t is not None and t.low for t in typed),
    }


def judged(proto: onnx.ModelProto, feeds: Feeds, expected: Mapping[str, list[Array]]) -> dict[str, Any]:
    """Judge a converted model: its counts, whether it passes the checker and opens, and its emulated errors."""
    row: dict[str, Any] = counted(View.of(Model.load(proto)))
    data = proto.SerializeToString()
    try:
        onnx.checker.check_model(proto, full_check=True)
    except FAULTS as fault:
        row["checker"] = line(fault)
    try:
        if not any(t in data_types(proto) for t in (onnx.TensorProto.BFLOAT16,)):
            session(data)  # the CPU provider has almost no bfloat16 kernels
    except FAULTS as fault:
        row["opens"] = line(fault)
    try:
        row["errors"] = errors(emulate(proto).to_proto().SerializeToString(), feeds, expected)
    except FAULTS as fault:
        row["emulation"] = line(fault)
    return row


def data_types(proto: onnx.ModelProto) -> set[int]:
    found = {t.data_type for t in proto.graph.initializer}
    return found | {a.i for n in proto.graph.node if n.op_type == "Cast" for a in n.attribute}


def line(fault: BaseException) -> str:
    return f"{type(fault).__name__}: {' '.join(str(fault).split())[:300]}"


def high(converted: Any) -> list[str]:
    """Return the products in float32, with their reasons."""
    rows = converted.report.rows
    return [f"{r.op} {r.name}: {r.why}: {r.note or r.reason}" for r in rows if r.op in COMPUTE and r.dtype == "float32"]


def raised(converted: Any) -> dict[str, int]:
    """Count the float32 ops by type and rule."""
    rows = [r for r in converted.report.rows if r.dtype == "float32"]
    return dict(Counter(f"{r.op}/{r.rule}" for r in rows).most_common(30))


def main() -> None:
    path, peers = Path(sys.argv[1]), [Path(p) for p in sys.argv[2:]]
    name, exporter = path.name.split(".")[:2]
    proto = onnx.load(path)
    with np.load(path.with_name(f"{name}.npz")) as stored:
        arrays = {key: stored[key] for key in stored.files}
    names = sorted({key.split("/")[0] for key in arrays})
    feeds = {b: {k.split("/", 2)[2]: v for k, v in arrays.items() if k.startswith(f"{b}/in/")} for b in names}
    torch_outputs = {
        kind: {b: [arrays[f"{b}/{kind}/{i}"] for i in range(99) if f"{b}/{kind}/{i}" in arrays] for b in names}
        for kind in ("float32", "float16", "bfloat16")
    }

    def say(way: str, **what: Any) -> None:
        print(json.dumps({"architecture": name, "exporter": exporter, "way": way, **what}), flush=True)

    try:
        reference = session(proto.SerializeToString())
    except FAULTS as fault:
        say("float32", fault=line(fault))
        return
    expected, rejected = {}, {}
    for batch, inputs in feeds.items():
        try:
            expected[batch] = run(reference, inputs)
        except FAULTS as fault:  # a graph that is only valid for the first batch
            rejected[batch] = line(fault)
    feeds = {batch: feeds[batch] for batch in expected}
    row: dict[str, Any] = {**counted(View.of(Model.load(proto))), "refused": rejected}
    row["opset"] = next(o.version for o in proto.opset_import if o.domain == "")
    row["errors"] = {b: apart(expected[b], torch_outputs["float32"][b]) for b in expected}
    say("float32", **row)
    for kind in ("float16", "bfloat16"):
        theirs = {b: apart(y, torch_outputs["float32"][b]) for b, y in torch_outputs[kind].items() if y}
        if theirs:
            say(f"torch-{kind}", errors=theirs)
    for way, options in WAYS.items():
        try:
            converted = convert(proto, **options)
            row = judged(converted.model, feeds, expected)
            if way in ("float16", "bfloat16"):
                row |= {"high": high(converted), "raised": raised(converted)}
                row["findings"] = [f"{f.kind} {f.subject}: {f.message}" for f in converted.report.findings][:40]
        except Exception as fault:  # noqa: BLE001  # the sweep looks for faults
            row = {"fault": line(fault), "where": "".join(traceback.format_tb(fault.__traceback__)[-3:])}
        say(way, **row)
    for peer in peers:
        try:
            row = judged(onnx.load(peer), feeds, expected)
        except FAULTS as fault:
            row = {"fault": line(fault)}
        say(peer.stem.split(".")[-1], **row)


if __name__ == "__main__":
    main()
