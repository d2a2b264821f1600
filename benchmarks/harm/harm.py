"""Errors of conversions, compared with rounding only the products' inputs (A) or also their results (B).

    python benchmarks/run.py harm FOLDER [--to float16 bfloat16] [--peers PYTHON] [--autocast PYTHON]
    python benchmarks/run.py harm FOLDER --suite     # write the models of tests/suites/harm into FOLDER, then measure
    python benchmarks/run.py harm FOLDER --before CHECKOUT    # compare with another version of this package

FOLDER contains models, each with its batch in NAME.npz; without one, inputs are random. Like B, PyTorch's autocast
rounds around matrix products and convolutions. `--before` is a checkout of another commit of this project: the table
then compares its conversions with ours. The Casts in parentheses run on CUDA in onnxruntime, for models whose
conversion changed, if the tests' CUDA stub can be built. `--peers` is an interpreter with onnxconverter-common and
onnxruntime, `--autocast` is one with nvidia-modelopt[onnx].

A separate process with limits of time and memory measures each model, and FOLDER/rows keeps its row. An interrupted run
resumes where it stopped, `--models` selects the models of this run, and `--again` measures our conversion again but
keeps the errors of references, peers and the other version. Models stay on disk, so full-size ones fit. `harm_page`
writes the page from the rows.

If ours exceeds the tolerance and a reference does not, B runs eight more times with random errors of the size of
rounding. If two of these also exceed the tolerance, the reference was right by chance, and the row is "undecided".

An error is the largest difference of an output, relative to its largest magnitude, over all outputs; a different
integer is an infinite error. For exported architectures, the batches are the one as built and the one with a fully
masked row, and the row shows the worse. NAME.json next to a model may state a `tolerance`, as a factor, with a
`reason`. All low precision is emulated on onnxruntime's CPU provider. The low shares of operations and bytes are
estimates of the cost model; bytes are the ops' reads and writes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from amp_rewrite import AmpRewriteError, DType, Feed, Model, View, convert, emulate
from amp_rewrite.decide import sizes
from amp_rewrite.reports import work
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
"""Errors recorded in a model's row; the other models are still measured."""
DRAWS, CHANCE = 8, 2
"""How often B runs with random errors if ours harms, and how many wrong draws prove that B is right by chance."""
PEERS = ("onnxruntime_float16", "onnxconverter_common")
BEFORE = "before"
FLOAT = onnx.TensorProto.FLOAT
HEAD = ("model", "ours", "A", "B", "others", "Casts", "low operations", "bytes", "low bytes", "verdict")

COMPARED = ("model", "error before", "after", "A", "B", "Casts (on CUDA)", "low operations", "bytes", "verdict")

Array = np.ndarray[Any, Any]
Batch = Mapping[str, Array]
Errors = Mapping[str, Mapping[str, float]]
"""Errors by way ("ours", "A", "B", a peer, "before") and batch."""


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a conversion. `operations` and `low_bytes` are low shares; `on_cuda`: the Casts left on CUDA."""

    casts: int
    operations: float
    bytes: int
    low_bytes: float
    on_cuda: int | None = None


@dataclass(frozen=True, slots=True)
class Judged:
    """One model: errors by way and batch, and the sizes of our conversion and of the other version's.

    `parameters`: the size of its initializers; `inputs`: their shapes in the batch as built. `draws`: errors of
    reference B with random errors of the size of rounding, if ours harms.
    """

    model: str
    limit: float
    errors: Errors
    size: Size | None = None
    before: Size | None = None
    findings: Sequence[str] = ()
    parameters: int = 0
    inputs: Mapping[str, Sequence[int]] = field(default_factory=dict)
    draws: Sequence[float] = ()
    fault: str = ""

    @staticmethod
    def of(row: Mapping[str, Any]) -> Judged:
        """Read a stored row."""
        sizes = {key: Size(**row[key]) if row.get(key) else None for key in ("size", "before")}
        return Judged(**{**row, **sizes})

    @property
    def batch(self) -> str:
        """The batch to show: one harmed by ours, or else the one with our largest error."""
        ours = self.errors["ours"]
        return max(ours, key=lambda batch: (bool(self._right(batch)), ours[batch]))

    def shown(self, way: str) -> float:
        """Return the error of a way in the batch to show; NaN if it was not compared."""
        return self.errors.get(way, {}).get(self.batch, np.nan)

    def _right(self, batch: str) -> list[str]:
        """Return the references within the tolerance if ours is not."""
        if self.errors["ours"][batch] <= self.limit:
            return []
        return [name for name in ("B", "A") if self.errors[name][batch] <= self.limit]

    @property
    def judgement(self) -> str:
        """Return "harmed" with the reference's name if ours exceeds the tolerance and a reference does not.

        A reference that is right by chance does not count: with random errors of the same size, a choice between near
        equals may go the other way.
        """
        if self.fault:
            return self.fault
        if self.shown("ours") <= self.limit:
            return "right"
        right = self._right(self.batch)
        if (wrong := sum(not error <= self.limit for error in self.draws)) >= CHANCE:
            right_ones = f"{' and '.join(sorted(right))} {'is' if len(right) == 1 else 'are'} right"
            return f"undecided: {right_ones}, but {wrong} of {len(self.draws)} random perturbations are wrong"
        return f"harmed: {', '.join(right)} right" if right else "wrong, like both references"


def judged(path: Path, args: argparse.Namespace, kept: Mapping[DType, Judged]) -> Iterator[tuple[DType, Judged]]:
    """Convert one model to each type in all ways and compare; take the other ways' errors from `kept` rows."""
    batches = _batches(path)
    notes = path.with_suffix(".json")
    stated = json.loads(notes.read_text("utf-8")) if notes.exists() else {}
    exact = {batch: _run(path, inputs) for batch, inputs in batches.items()}

    shapes = {name: list(array.shape) for name, array in next(iter(batches.values())).items()}
    about = _parameters(path), shapes

    def error(model: Path) -> dict[str, float]:
        return {batch: relative_error(exact[batch], _run(model, inputs)) for batch, inputs in batches.items()}

    def emulated(model: Path) -> dict[str, float]:
        twin = model.with_name("twin.onnx")
        emulate(model).save(twin, overwrite=True, external_data=_large(path))
        return error(twin)

    def drawn(row: Judged, to: DType, reference: Path) -> list[float]:
        found = []
        for draw in range(DRAWS if row.judgement.startswith("harmed") else 0):
            _write_reference(path, reference, to, results=True, draw=draw)
            found.append(relative_error(exact[row.batch], _run(reference, batches[row.batch])))
        return found

    with tempfile.TemporaryDirectory(prefix="amp-rewrite-", dir=path.parent) as folder:
        at = Path(folder)
        former = _of_other_state(path, at, args) if args.before is not None else {}
        for to in args.to:
            ours = at / f"{to.spelling}.onnx"
            converted = convert(path, to=to, **stated.get("options", {}))
            findings = sorted({f"{f.kind}: {f.subject}" for f in converted.report.findings})
            converted.save(ours)
            del converted
            same = to in former and _same(ours, former[to])
            casts = [None, None] if same or to not in former else _casts_on_cuda([ours, former[to]])
            size = _size(ours, to, casts[0])
            errors: dict[str, Mapping[str, float]] = {"ours": emulated(ours)}
            if (old := kept.get(to)) is not None:
                errors |= {way: found for way, found in old.errors.items() if way != "ours"}
                row = Judged(path.stem, old.limit, errors, size, old.before, findings, *about)
                yield to, replace(row, draws=old.draws or drawn(row, to, at / "reference.onnx"))
                continue
            for name, results in (("A", False), ("B", True)):
                _write_reference(path, at / "reference.onnx", to, results=results)
                errors[name] = error(at / "reference.onnx")
            for name, tool in _peers(args.peers, args.autocast):
                if tool(path, at / f"{name}.onnx"):
                    errors[name] = emulated(at / f"{name}.onnx")
            if to in former:
                errors[BEFORE] = errors["ours"] if same else emulated(former[to])
            before = _size(former[to], to, casts[1]) if to in former else None
            limit = TOLERANCE[to] * stated.get("tolerance", 1.0)
            row = Judged(path.stem, limit, errors, size, before, findings, *about)
            yield to, replace(row, draws=drawn(row, to, at / "reference.onnx"))


def _same(a: Path, b: Path) -> bool:
    """Return True if two conversions of one model have the same graph, apart from the places of their weights."""
    graphs = [onnx.load(path, load_external_data=False).graph for path in (a, b)]
    for graph in graphs:
        for tensor in graph.initializer:
            del tensor.external_data[:]
    return bool(graphs[0] == graphs[1])


def _parameters(path: Path) -> int:
    """Return the number of floating-point values in a model's initializers."""
    weights = (t for t in onnx.load(path, load_external_data=False).graph.initializer if t.data_type == FLOAT)
    return sum(math.prod(tensor.dims) for tensor in weights)


def _large(path: Path) -> bool:
    """Return True if a model has external data or is large."""
    return any(path.parent.glob(f"{path.name}.data")) or path.stat().st_size > 1.5e9


def _write_reference(path: Path, out: Path, to: DType, *, results: bool, draw: int | None = None) -> None:
    """Write a reference next to links to the model's data, to avoid loading its weights."""
    proto = onnx.load(path, load_external_data=not _large(path))
    for data in path.parent.glob(f"{path.name}.data*"):
        if not (out.parent / data.name).exists():
            os.link(data, out.parent / data.name)
    onnx.save(rounded_products(proto, to, results=results, draw=draw), out)


def _run(path: Path, batch: Batch) -> list[Any]:
    """Run a float32 model or a twin, with inputs cast to its declared types."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.add_session_config_entry("session.disable_prepacking", "1")  # prepacking would copy the weights
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    feeds = {i.name: batch[i.name].astype(_NUMPY.get(i.type, batch[i.name].dtype)) for i in session.get_inputs()}
    return list(session.run(None, feeds))


_NUMPY = {"tensor(float16)": np.dtype(np.float16), "tensor(float)": np.dtype(np.float32)}


def _casts_on_cuda(models: Sequence[Path]) -> list[int | None]:
    """Return the number of Casts left on CUDA by onnxruntime; None without the stub, or for a rejected model.

    This skips models of more than 400 MB, since the stub copies weights, which takes minutes.
    """
    if stub.folder()[0] is None or sum(file.stat().st_size for file in models[0].parent.iterdir()) > MAX_ON_CUDA:
        return [None] * len(models)
    return [row.get("casts") for row in stub.placements(models)]


MAX_ON_CUDA = 400e6 * 2
"""Size limit in bytes of our conversion and the other version's together."""
BATCHES = ("built", "masked")
"""The batches used from the benchmark of architectures: as built, and with a fully masked row."""


def _batches(path: Path) -> dict[str, Batch]:
    """Return a model's inputs by batch: those stored next to it, or else a random batch."""
    model = Model.load(path)
    stored_batch = next(
        (p for p in (path.with_suffix(".npz"), path.with_name(f"{path.name.split('.')[0]}.npz")) if p.exists()), None
    )
    if stored_batch is None:
        return {"drawn": dict(next(iter(Feed.randomly(model, shapes=_drawn_shapes(model)))))}
    stored = np.load(stored_batch)
    # The files of tests/models and of the benchmark of architectures also contain outputs.
    for prefixes in ({"built": "input/"}, {batch: f"{batch}/in/" for batch in BATCHES}):
        found = {batch: _below(stored, prefix) for batch, prefix in prefixes.items()}
        if any(found.values()):
            return {batch: inputs for batch, inputs in found.items() if inputs}
    return {"built": dict(next(iter(Feed.of(stored_batch, model))))}


def _below(stored: Mapping[str, Array], prefix: str) -> Batch:
    return {name.removeprefix(prefix): stored[name] for name in stored if name.startswith(prefix)}


def _drawn_shapes(model: Model) -> Mapping[str, tuple[int, ...]]:
    """Return a shape per input: free dimensions are 2 in front and 8 elsewhere, and equal for equal names."""
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


def _size(path: Path, to: DType, on_cuda: int | None) -> Size:
    """Return the size of a converted model."""
    view = View.of(Model.load(path))
    casts, total, low, moved, low_moved = 0, 0.0, 0.0, 0, 0
    for op in view.ops:
        casts += op.kind == "Cast"
        values = [v for v in (*op.inputs, *op.outputs) if v is not None]
        typed = [(v, dtype) for v in values if (dtype := view.dtype(v)) is not None and dtype.floating]
        flops = work.flops(view, op)
        total += flops
        low += flops if typed and typed[0][1].low else 0.0
        for value, dtype in typed:
            nbytes = dtype.nbytes(sizes.size(view, value))
            moved += nbytes
            low_moved += nbytes if dtype.low else 0
    shares = low / total if total else 0.0, moved, low_moved / moved if moved else 0.0
    return Size(casts, *shares, on_cuda)


def _peers(python: Path | None, autocast: Path | None) -> Iterator[tuple[str, Callable[[Path, Path], bool]]]:
    def tool(name: str, interpreter: Path) -> Callable[[Path, Path], bool]:
        command = [*measure.script("peer_tools", interpreter), name]
        return lambda model, out: measure.cost([*command, model, out], limit=300.0).code == 0

    if python is not None:
        yield from ((name, tool(name, python)) for name in PEERS)
    if autocast is not None:
        yield "modelopt_autocast", tool("modelopt_autocast", autocast)


_CONVERT = """
import sys
import amp_rewrite
for word in sys.argv[2:]:
    to, _, out = word.partition("=")
    amp_rewrite.convert(sys.argv[1], to=to).save(out)
"""


def _of_other_state(path: Path, folder: Path, args: argparse.Namespace) -> dict[DType, Path]:
    """Convert with the package of another checkout; return the file of each successful type."""
    made = {to: folder / f"before_{to.spelling}.onnx" for to in args.to}
    words = [f"{to.spelling}={out}" for to, out in made.items()]
    environment = {**os.environ, "PYTHONPATH": str(args.before.resolve())}
    command = [sys.executable, "-c", _CONVERT, str(path.resolve()), *words]
    subprocess.run(command, cwd=args.before, env=environment, capture_output=True)
    return {to: out for to, out in made.items() if out.exists()}


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


def row_file(path: Path, to: DType) -> Path:
    """Return the path of a model's row."""
    return path.parent / "rows" / f"{path.stem}.{to.spelling}.json"


def rows(folder: Path, to: DType) -> list[Judged]:
    """Return the rows of a folder, sorted by model."""
    kept = sorted(folder.glob(f"rows/*.{to.spelling}.json"))
    return [Judged.of(json.loads(path.read_text("utf-8"))) for path in kept]


def cells(row: Judged) -> tuple[object, ...]:
    """Return one row of the table."""
    if row.fault or row.size is None:
        return (row.model, *["–"] * 8, row.judgement)
    ours, a, b = (f"{row.shown(name):.1e}" for name in ("ours", "A", "B"))
    others = [f"{row.shown(name):.1e}" for name in row.errors if name not in ("ours", "A", "B", BEFORE)]
    size = row.size
    shares = f"{size.operations:.0%}", f"{size.bytes:,}", f"{size.low_bytes:.0%}"
    return (row.model, ours, a, b, " / ".join(others) or "–", size.casts, *shares, row.judgement)


def compared(row: Judged) -> tuple[object, ...]:
    """Return one row of the table of two versions."""
    if row.fault or row.before is None or row.size is None:
        return (row.model, *["–"] * 7, row.judgement)
    errors = [f"{row.shown(way):.1e}" for way in (BEFORE, "ours", "A", "B")]
    both = (row.before, row.size)
    casts = " → ".join(f"{size.casts}" + (f" ({size.on_cuda})" if size.on_cuda is not None else "") for size in both)
    shares = " → ".join(f"{each.operations:.0%}" for each in both)
    nbytes = f"{row.size.bytes / max(row.before.bytes, 1) - 1:+.1%}"
    return (row.model, *errors, casts, shares, nbytes, row.judgement)


def measured(path: Path, args: argparse.Namespace) -> None:
    """Measure a model in a separate process, and store its rows."""
    files = {to: row_file(path, to) for to in args.to}
    if all(file.exists() for file in files.values()) and not args.again:
        return
    command = [*measure.script("harm"), path.resolve(), "--to", *(to.spelling for to in args.to)]
    for option in ("peers", "autocast", "before"):
        if (value := getattr(args, option)) is not None:
            command += [f"--{option}", str(value)]
    with tempfile.TemporaryDirectory(prefix="amp-rewrite-") as folder:
        out = Path(folder) / "rows"
        run = measure.cost(command, stdout=out, limit=args.limit, memory=args.memory * 1e9)
        found = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    why = " ".join((run.said or f"exit code {run.code}").split())[-160:]
    failed = asdict(Judged(path.stem, 0.0, {}, fault=why))
    for at, file in enumerate(files.values()):
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(found[at] if at < len(found) else failed), encoding="utf-8")


def one(path: Path, args: argparse.Namespace) -> None:
    """Print the rows of one model as JSON, one line per type."""
    kept = {to: row for to in args.to for row in rows(path.parent, to) if row.model == path.stem and not row.fault}
    try:
        for _, row in judged(path, args, kept if len(kept) == len(args.to) else {}):
            print(json.dumps(asdict(row)), flush=True)
    except FAULTS as fault:
        print(" ".join(str(fault).split())[:160], file=sys.stderr)
        sys.exit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a folder of models; for a model file, only print its rows as JSON")
    parser.add_argument("--models", nargs="*", metavar="GLOB", default=["*"], help="the models to measure in this run")
    parser.add_argument("--to", nargs="+", default=[DType.FLOAT16], type=DType.parse)
    parser.add_argument("--suite", action="store_true", help="write the models of tests/suites/harm into FOLDER first")
    parser.add_argument("--again", action="store_true", help="measure our conversions again")
    parser.add_argument("--peers", type=Path)
    parser.add_argument("--autocast", type=Path)
    parser.add_argument("--before", type=Path, metavar="CHECKOUT")
    parser.add_argument("--limit", type=float, default=900.0, help="time limit per model in seconds")
    parser.add_argument("--memory", type=float, default=8.0, help="memory limit per model in GB")
    args = parser.parse_args()
    if args.folder.suffix == ".onnx":
        one(args.folder, args)
        return
    args.folder.mkdir(parents=True, exist_ok=True)
    if args.suite:
        if len(args.to) > 1:
            parser.error("the suite has different models for each type; give one type")
        write_suite(args.folder, *args.to)
    chosen = {path for glob in args.models for path in args.folder.glob(f"{glob}.onnx")}
    for path in sorted(chosen):
        measured(path, args)
    for to in args.to:
        found = [row for row in rows(args.folder, to) if args.folder / f"{row.model}.onnx" in chosen]
        table = (COMPARED, map(compared, found)) if args.before is not None else (HEAD, map(cells, found))
        print("\n".join(measure.markdown(*table)))
        harmed = sum(row.judgement.startswith("harmed") for row in found)
        print(f"\n{len(found)} models in {to.spelling}: {harmed} harmed\n")


if __name__ == "__main__":
    main()
