"""Errors of conversions beside two references: only what products read is rounded (A), or their results as well (B).

    python benchmarks/run.py harm FOLDER [--to float16|bfloat16] [--peers PYTHON] [--autocast PYTHON]
    python benchmarks/run.py harm FOLDER --suite     # write the models of tests/suites/harm into FOLDER, then measure
    python benchmarks/run.py harm FOLDER --before CHECKOUT    # compare with another state of this package

FOLDER holds models, each with a batch beside it, NAME.npz; without one, inputs are drawn at random. B is what PyTorch's
autocast rounds around matrix products and convolutions. `--before` is a folder with another commit of this project: the
table then sets its conversions beside ours. The Casts in brackets are those that onnxruntime runs on CUDA, where the
CUDA stub of the tests can be built. `--peers` is an interpreter with onnxconverter-common and onnxruntime, `--autocast`
one with nvidia-modelopt[onnx].

An error is the largest difference of an output, relative to its largest magnitude, of all outputs; an integer that
differs is an infinite error. NAME.json beside a model may state another `tolerance`, a factor, with its `reason`. All
low precision is emulated on onnxruntime's CPU provider. The share of operations and bytes that is low is that of the
cost model; bytes are those that ops read and write.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from amp_rewrite import AmpRewriteError, DType, Feed, Model, View, convert, emulate
from amp_rewrite.decide.placement.cost_model import CostModel
from amp_rewrite.runtime.roofline import ROOFS
from benchmarks.shared import measure
from support import objections, stub
from support.rounded_products import relative_error, rounded_products

TOLERANCE = {DType.FLOAT16: 2e-2, DType.BFLOAT16: 16e-2}
FAULTS = (
    AmpRewriteError,
    onnx.checker.ValidationError,
    onnx.shape_inference.InferenceError,
    ValueError,
    *objections.refusals(),
)
"""What makes a model's row an error; the others are still measured."""
PEERS = ("onnxruntime_float16", "onnxconverter_common")
BEFORE = "before"
HEAD = ("model", "ours", "A", "B", "others", "Casts", "operations low", "bytes", "bytes low", "judgement")

COMPARED = ("model", "error before", "after", "B", "Casts (on CUDA)", "operations low", "bytes", "judgement")


@dataclass(frozen=True, slots=True)
class Judged:
    """One model: errors by way, and the size of our conversion; `operations` and `low_bytes` are shares."""

    model: str
    limit: float
    errors: Mapping[str, float]
    casts: int
    operations: float
    bytes: int
    low_bytes: float
    on_cuda: int | None = None
    before: Judged | None = None
    fault: str = ""

    @property
    def judgement(self) -> str:
        """Return "harmed" where ours exceeds the tolerance and a reference does not; the reference is named."""
        if self.fault:
            return self.fault
        if self.errors["ours"] <= self.limit:
            return "right"
        right = [name for name in ("B", "A") if self.errors[name] <= self.limit]
        return f"harmed: {', '.join(right)} right" if right else "wrong, as both references"


def judged(path: Path, to: DType, peers: Mapping[str, Callable[[Path, Path], bool]]) -> Judged:
    """Convert one model in all ways and compare."""
    proto = onnx.load(path)
    batch = _batch(path)
    beside = path.with_suffix(".json")
    stated = json.loads(beside.read_text("utf-8")) if beside.exists() else {}
    limit = TOLERANCE[to] * stated.get("tolerance", 1.0)
    exact = objections.run(proto, batch, "BASIC")
    converted = convert(proto, to=to, **stated.get("options", {}))
    errors = {"ours": relative_error(exact, _run(converted.model, batch))}
    for name, results in (("A", False), ("B", True)):
        errors[name] = relative_error(
            exact, objections.run(rounded_products(proto, to, results=results), batch, "BASIC")
        )
    before = None
    for name, tool in peers.items():
        with tempfile.TemporaryDirectory(prefix="amp-rewrite-") as folder:
            out = Path(folder) / path.name
            done = tool(path, out)
            error = relative_error(exact, _run(onnx.load(out), batch)) if done else np.nan
            if name == BEFORE and done:
                size = _size(View.of(Model.load(out)), to)
                before = Judged(path.stem, limit, {**errors, "ours": error}, *size, _casts_on_cuda(onnx.load(out)))
            elif name != BEFORE:
                errors[name] = error
    on_cuda = _casts_on_cuda(converted.model) if before is not None else None
    return Judged(path.stem, limit, errors, *_size(View.of(Model.load(converted.model)), to), on_cuda, before)


def _casts_on_cuda(model: onnx.ModelProto) -> int | None:
    """Return the Casts that onnxruntime is left with on CUDA; None without the stub, or where it refuses the model."""
    if stub.folder()[0] is None:
        return None
    with tempfile.TemporaryDirectory(prefix="amp-rewrite-") as folder:
        path = Path(folder) / "model.onnx"
        onnx.save(model, path)
        (row,) = stub.placements([path])
    return row.get("casts")


def _run(model: onnx.ModelProto, batch: Mapping[str, Any]) -> list[Any]:
    twin = emulate(model).to_proto()
    types = {p.name: onnx.helper.tensor_dtype_to_np_dtype(p.type.tensor_type.elem_type) for p in twin.graph.input}
    fed = {name: np.asarray(array).astype(types[name]) for name, array in batch.items() if name in types}
    return objections.run(twin, fed, "BASIC")


_PREFIXES = ("input/", "built/in/")
"""Inputs in the files of tests/models and of the benchmark of architectures, which hold outputs as well."""


def _batch(path: Path) -> Mapping[str, Any]:
    model = Model.load(path)
    beside = next(
        (p for p in (path.with_suffix(".npz"), path.with_name(f"{path.name.split('.')[0]}.npz")) if p.exists()), None
    )
    stored = np.load(beside) if beside is not None else {}
    for prefix in _PREFIXES:
        if inputs := {name.removeprefix(prefix): stored[name] for name in stored if name.startswith(prefix)}:
            return inputs
    feed = Feed.of(beside, model) if beside is not None else Feed.randomly(model, shapes=_drawn_shapes(model))
    return dict(next(iter(feed)))


def _drawn_shapes(model: Model) -> Mapping[str, tuple[int, ...]]:
    """Return a shape for each input: 2 for a free length in front, 8 for others, the same for the same name."""
    filled, known = {tensor.name for tensor in model.proto.graph.initializer}, dict[str, int]()
    shapes: dict[str, tuple[int, ...]] = {}
    for port in model.proto.graph.input:
        dims = port.type.tensor_type.shape.dim
        sizes = [
            dim.dim_value or known.setdefault(dim.dim_param or f"{port.name}_{at}", 8 if at else 2)
            for at, dim in enumerate(dims)
        ]
        if port.name not in filled:
            shapes[port.name] = tuple(sizes)
    return shapes


def _size(view: View, to: DType) -> tuple[int, float, int, float]:
    """Return the Casts, the share of low operations, the bytes read and written, and the share of low bytes."""
    costs = CostModel(view, ROOFS["A100"], to)
    casts, total, low, moved, low_moved = 0, 0.0, 0.0, 0, 0
    for op in view.ops:
        casts += op.kind == "Cast"
        values = [v for v in (*op.inputs, *op.outputs) if v is not None]
        typed = [(v, dtype) for v in values if (dtype := view.dtype(v)) is not None and dtype.floating]
        flops = costs.flops(op)
        total += flops
        low += flops if typed and typed[0][1].low else 0.0
        for value, dtype in typed:
            nbytes = dtype.nbytes(costs.size(value))
            moved += nbytes
            low_moved += nbytes if dtype.low else 0
    return casts, low / total if total else 0.0, moved, low_moved / moved if moved else 0.0


def _peers(python: Path | None, autocast: Path | None) -> Iterator[tuple[str, Callable[[Path, Path], bool]]]:
    def tool(name: str, interpreter: Path) -> Callable[[Path, Path], bool]:
        command = [*measure.script("peer_tools", interpreter), name]
        return lambda model, out: measure.cost([*command, model, out], limit=300.0).code == 0

    if python is not None:
        yield from ((name, tool(name, python)) for name in PEERS)
    if autocast is not None:
        yield "modelopt_autocast", tool("modelopt_autocast", autocast)


def _other_state(checkout: Path, to: DType) -> Callable[[Path, Path], bool]:
    """Return a tool that converts with the package of another checkout."""
    command = [sys.executable, "-m", "amp_rewrite", "--to", to.spelling, "--quiet", "-o"]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}

    def convert_there(model: Path, out: Path) -> bool:
        done = subprocess.run([*command, str(out), str(model)], cwd=checkout, env=environment, capture_output=True)
        return done.returncode == 0

    return convert_there


def write_suite(folder: Path, to: DType) -> None:
    """Write the models of the suite with their batches and tolerances."""
    from suites.harm.case import CASES

    for case in (c for c in CASES if c.to is to):
        kind = "free" if case.free else "static"
        name = "_".join((case.principle, case.kind, *case.name.replace(",", "").split(), kind))
        onnx.save(case.model(), folder / f"{name}.onnx")
        np.savez(folder / f"{name}.npz", **case.batch())
        stated = {"tolerance": case.tolerance, "reason": case.reason, "options": case.options}
        (folder / f"{name}.json").write_text(json.dumps(stated), encoding="utf-8")


def cells(row: Judged) -> tuple[object, ...]:
    """Return one row of the table."""
    if row.fault:
        return (row.model, *["–"] * 8, row.judgement)
    ours, a, b, *others = (f"{e:.1e}" for e in row.errors.values())
    shares = f"{row.operations:.0%}", f"{row.bytes:,}", f"{row.low_bytes:.0%}"
    return (row.model, ours, a, b, " / ".join(others) or "–", row.casts, *shares, row.judgement)


def compared(row: Judged) -> tuple[object, ...]:
    """Return one row of the table of two states."""
    if row.fault or row.before is None:
        return (row.model, *["–"] * 6, row.judgement)
    old = row.before
    errors = [f"{e:.1e}" for e in (old.errors["ours"], row.errors["ours"], row.errors["B"])]
    casts = " → ".join(f"{each.casts} ({each.on_cuda})" for each in (old, row))
    shares = f"{old.operations:.0%} → {row.operations:.0%}", f"{row.bytes / max(old.bytes, 1) - 1:+.1%}"
    return (row.model, *errors, casts, *shares, row.judgement)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--to", default="float16", type=DType.parse)
    parser.add_argument("--suite", action="store_true", help="write the models of tests/suites/harm into FOLDER first")
    parser.add_argument("--peers", type=Path)
    parser.add_argument("--autocast", type=Path)
    parser.add_argument("--before", type=Path, metavar="CHECKOUT")
    parser.add_argument("--json", type=Path, help="write the rows to this file as well")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    if given.suite:
        write_suite(given.folder, given.to)
    peers = dict(_peers(given.peers, given.autocast))
    if given.before is not None:
        peers[BEFORE] = _other_state(given.before.resolve(), given.to)
    rows = []
    for path in sorted(given.folder.glob("*.onnx")):
        try:
            rows.append(judged(path, given.to, peers))
        except FAULTS as fault:
            rows.append(Judged(path.stem, 0.0, {}, 0, 0.0, 0, 0.0, fault=" ".join(str(fault).split())[:120]))
    table = (COMPARED, map(compared, rows)) if given.before is not None else (HEAD, map(cells, rows))
    print("\n".join(measure.markdown(*table)))
    harmed = sum(row.judgement.startswith("harmed") for row in rows)
    print(f"\n{len(rows)} models to {given.to.spelling}: {harmed} harmed")
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(row) for row in rows], indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
