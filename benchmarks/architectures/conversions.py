"""Convert one exported model in many ways and run each result: `conversions MODEL [PEER.onnx ...]`.

Prints JSON lines, one for each way, flushed at once so that a crash costs only the way it happened at. NAME.npz lies
beside NAME.EXPORTER.onnx. All low precision is emulated; errors are measured against the float32 model, both run by
onnxruntime's CPU provider.
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
Fed = Mapping[str, Mapping[str, Array]]
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
# What comes out of a conversion by itself, and what else is asked for.
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
    # onnxruntime 1.31.1 crashes there on float16 recurrences.
    return onnxruntime.InferenceSession(
        model, options, providers=["CPUExecutionProvider"], disabled_optimizers=["NchwcTransformer"]
    )


def run(made: onnxruntime.InferenceSession, inputs: Mapping[str, Array]) -> list[Array]:
    kept = {i.name for i in made.get_inputs()}
    return made.run(None, {name: value for name, value in inputs.items() if name in kept})


def apart(found: list[Array], wanted: list[Array]) -> tuple[float, float, int]:
    """(largest error in units of the largest output, the same in L2, how many became NaN or infinite)."""
    largest, l2, broken = 0.0, 0.0, 0
    for y, want in zip(found, wanted, strict=True):
        if want.dtype.kind != "f" or not want.size:
            continue
        if y.shape != want.shape:  # how long an output is may hang on numbers, such as predicted durations
            broken += want.size
            continue
        y, want = y.astype(np.float64), want.astype(np.float64)
        real = np.isfinite(want)
        broken += int(np.count_nonzero(~np.isfinite(y[real])))
        good = real & np.isfinite(y)
        if not good.any():
            continue
        difference = np.abs(y[good] - want[good])
        largest = max(largest, float(difference.max() / max(np.abs(want[real]).max(), 1e-30)))
        l2 = max(l2, float(np.linalg.norm(difference) / max(np.linalg.norm(want[real]), 1e-30)))
    return largest, l2, broken


def errors(proto: bytes, fed: Fed, wanted: Mapping[str, list[Array]]) -> dict[str, Any]:
    made = session(proto)
    return {batch: apart(run(made, inputs), wanted[batch]) for batch, inputs in fed.items()}


def counted(view: View) -> dict[str, Any]:
    """Casts that run (those of constants are folded when a model is loaded), products in all and low ones, ops."""
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


def judged(proto: onnx.ModelProto, fed: Fed, wanted: Mapping[str, list[Array]]) -> dict[str, Any]:
    """What a converted model is like: counts, whether it passes the checker and opens, errors of its emulation."""
    row: dict[str, Any] = counted(View.of(Model.load(proto)))
    data = proto.SerializeToString()
    try:
        onnx.checker.check_model(proto, full_check=True)
    except FAULTS as fault:
        row["checker"] = line(fault)
    try:
        if not any(t in data_types(proto) for t in (onnx.TensorProto.BFLOAT16,)):
            session(data)  # its CPU provider has next to no bfloat16
    except FAULTS as fault:
        row["opens"] = line(fault)
    try:
        row["errors"] = errors(emulate(proto).to_proto().SerializeToString(), fed, wanted)
    except FAULTS as fault:
        row["emulation"] = line(fault)
    return row


def data_types(proto: onnx.ModelProto) -> set[int]:
    found = {t.data_type for t in proto.graph.initializer}
    return found | {a.i for n in proto.graph.node if n.op_type == "Cast" for a in n.attribute}


def line(fault: BaseException) -> str:
    return f"{type(fault).__name__}: {' '.join(str(fault).split())[:300]}"


def high(converted: Any) -> list[str]:
    """Products that stay float32, each with its reason."""
    rows = converted.report.rows
    return [f"{r.op} {r.name}: {r.why}: {r.note or r.reason}" for r in rows if r.op in COMPUTE and r.dtype == "float32"]


def raised(converted: Any) -> dict[str, int]:
    """Ops that are float32, by type and rule."""
    rows = [r for r in converted.report.rows if r.dtype == "float32"]
    return dict(Counter(f"{r.op}/{r.rule}" for r in rows).most_common(30))


def main() -> None:
    path, peers = Path(sys.argv[1]), [Path(p) for p in sys.argv[2:]]
    name, exporter = path.name.split(".")[:2]
    proto = onnx.load(path)
    with np.load(path.with_name(f"{name}.npz")) as stored:
        arrays = {key: stored[key] for key in stored.files}
    names = sorted({key.split("/")[0] for key in arrays})
    fed = {b: {k.split("/", 2)[2]: v for k, v in arrays.items() if k.startswith(f"{b}/in/")} for b in names}
    torch_says = {
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
    wanted, refused = {}, {}
    for batch, inputs in fed.items():
        try:
            wanted[batch] = run(reference, inputs)
        except FAULTS as fault:  # a graph that holds what was true of the first batch alone
            refused[batch] = line(fault)
    fed = {batch: fed[batch] for batch in wanted}
    row: dict[str, Any] = {**counted(View.of(Model.load(proto))), "refused": refused}
    row["opset"] = next(o.version for o in proto.opset_import if o.domain == "")
    row["errors"] = {b: apart(wanted[b], torch_says["float32"][b]) for b in wanted}
    say("float32", **row)
    for kind in ("float16", "bfloat16"):
        theirs = {b: apart(y, torch_says["float32"][b]) for b, y in torch_says[kind].items() if y}
        if theirs:
            say(f"torch-{kind}", errors=theirs)
    for way, options in WAYS.items():
        try:
            converted = convert(proto, **options)
            row = judged(converted.model, fed, wanted)
            if way in ("float16", "bfloat16"):
                row |= {"high": high(converted), "raised": raised(converted)}
                row["findings"] = [f"{f.kind} {f.subject}: {f.message}" for f in converted.report.findings][:40]
        except Exception as fault:  # noqa: BLE001  # what the sweep looks for
            row = {"fault": line(fault), "where": "".join(traceback.format_tb(fault.__traceback__)[-3:])}
        say(way, **row)
    for peer in peers:
        try:
            row = judged(onnx.load(peer), fed, wanted)
        except FAULTS as fault:
            row = {"fault": line(fault)}
        say(peer.stem.split(".")[-1], **row)


if __name__ == "__main__":
    main()
