"""Errors of conversions beside two references: only what products read is rounded (A), or their results as well (B).

    python benchmarks/run.py harm FOLDER [--to float16 bfloat16] [--peers PYTHON] [--autocast PYTHON]
    python benchmarks/run.py harm FOLDER --suite     # write the models of tests/suites/harm into FOLDER, then measure
    python benchmarks/run.py harm FOLDER --before CHECKOUT    # compare with another state of this package

FOLDER holds models, each with a batch beside it, NAME.npz; without one, inputs are drawn at random. B is what PyTorch's
autocast rounds around matrix products and convolutions. `--before` is a folder with another commit of this project: the
table then sets its conversions beside ours. The Casts in brackets are those that onnxruntime runs on CUDA, for models
whose conversion changed and where the CUDA stub of the tests can be built. `--peers` is an interpreter with
onnxconverter-common and onnxruntime, `--autocast` one with nvidia-modelopt[onnx].

Every model is measured by a process of its own with limits of time and memory, and its row is kept in FOLDER/rows: a
run that is broken off goes on where it stopped, `--models` measures some now and others later, and `--again` measures
our conversion anew while errors of references, peers and the other state stay. Models lie on disk throughout, so those
of real size fit. `harm_page` makes the page of the rows.

Where ours exceeds the tolerance and a reference does not, B is drawn eight times with random errors of the size of
rounding: if two are beyond the tolerance, too, the reference was right by chance, and the row says "undecided".

An error is the largest difference of an output, relative to its largest magnitude, of all outputs; an integer that
differs is an infinite error. Of the batches of an exported architecture, the one as built and the one with a row that
is masked throughout count, and a row shows the worst. NAME.json beside a model may state another `tolerance`, a factor,
with its `reason`. All low precision is emulated on onnxruntime's CPU provider. The share of operations and bytes that
is low is that of the cost model; bytes are those that ops read and write.
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
"""What makes a model's row an error; the others are still measured."""
DRAWS, CHANCE = 8, 2
"""How often B is drawn with random errors where ours harms, and how many wrong draws show that B is right by chance."""
PEERS = ("onnxruntime_float16", "onnxconverter_common")
BEFORE = "before"
FLOAT = onnx.TensorProto.FLOAT
HEAD = ("model", "ours", "A", "B", "others", "Casts", "operations low", "bytes", "bytes low", "judgement")

COMPARED = ("model", "error before", "after", "A", "B", "Casts (on CUDA)", "operations low", "bytes", "judgement")

Array = np.ndarray[Any, Any]
Batch = Mapping[str, Array]
Errors = Mapping[str, Mapping[str, float]]
"""Errors by way ("ours", "A", "B", a peer, "before") and batch."""


@dataclass(frozen=True, slots=True)
class Size:
    """What a conversion comes to; `operations` and `low_bytes` are shares, `on_cuda` the Casts left on CUDA."""

    casts: int
    operations: float
    bytes: int
    low_bytes: float
    on_cuda: int | None = None


@dataclass(frozen=True, slots=True)
class Judged:
    """One model: errors by way and batch, and the size of our conversion and of that of the other state.

    `parameters`: numbers in its initializers; `inputs`: their shapes in the batch as built. `draws`: errors of
    reference B with random errors of the size of rounding, measured where ours harms.
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
        """Read a row that was kept."""
        sizes = {key: Size(**row[key]) if row.get(key) else None for key in ("size", "before")}
        return Judged(**{**row, **sizes})

    @property
    def batch(self) -> str:
        """The batch that a row shows: one where ours harms, else that of our largest error."""
        ours = self.errors["ours"]
        return max(ours, key=lambda batch: (bool(self._right(batch)), ours[batch]))

    def shown(self, way: str) -> float:
        """Return the error of a way in the batch that the row shows; NaN where nothing was compared."""
        return self.errors.get(way, {}).get(self.batch, np.nan)

    def _right(self, batch: str) -> list[str]:
        """Return the references that are within the tolerance where ours is not."""
        if self.errors["ours"][batch] <= self.limit:
            return []
        return [name for name in ("B", "A") if self.errors[name][batch] <= self.limit]

    @property
    def judgement(self) -> str:
        """Return "harmed" where ours exceeds the tolerance and a reference does not; the reference is named.

        A reference that is right by chance says nothing: a choice between near equals goes the other way for random
        errors of the same size.
        """
        if self.fault:
            return self.fault
        if self.shown("ours") <= self.limit:
            return "right"
        right = self._right(self.batch)
        if (wrong := sum(not error <= self.limit for error in self.draws)) >= CHANCE:
            return f"undecided: {', '.join(right)} right, but {wrong} of {len(self.draws)} draws wrong"
        return f"harmed: {', '.join(right)} right" if right else "wrong, as both references"


def judged(path: Path, args: argparse.Namespace, kept: Mapping[DType, Judged]) -> Iterator[tuple[DType, Judged]]:
    """Convert one model to each type in all ways and compare; errors of other ways are taken over from `kept` rows."""
    fed = _batches(path)
    beside = path.with_suffix(".json")
    stated = json.loads(beside.read_text("utf-8")) if beside.exists() else {}
    exact = {batch: _run(path, inputs) for batch, inputs in fed.items()}

    shapes = {name: list(array.shape) for name, array in next(iter(fed.values())).items()}
    about = _parameters(path), shapes

    def error(model: Path) -> dict[str, float]:
        return {batch: relative_error(exact[batch], _run(model, inputs)) for batch, inputs in fed.items()}

    def emulated(model: Path) -> dict[str, float]:
        twin = model.with_name("twin.onnx")
        emulate(model).save(twin, overwrite=True, external_data=_large(path))
        return error(twin)

    def drawn(row: Judged, to: DType, reference: Path) -> list[float]:
        found = []
        for draw in range(DRAWS if row.judgement.startswith("harmed") else 0):
            _write_reference(path, reference, to, results=True, draw=draw)
            found.append(relative_error(exact[row.batch], _run(reference, fed[row.batch])))
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
    """True if two models compute the same with the same weights, which both take from one original."""
    graphs = [onnx.load(path, load_external_data=False).graph for path in (a, b)]
    for graph in graphs:
        for tensor in graph.initializer:
            del tensor.external_data[:]
    return bool(graphs[0] == graphs[1])


def _parameters(path: Path) -> int:
    """Return how many floating-point numbers a model's initializers hold."""
    weights = (t for t in onnx.load(path, load_external_data=False).graph.initializer if t.data_type == FLOAT)
    return sum(math.prod(tensor.dims) for tensor in weights)


def _large(path: Path) -> bool:
    """True if a model lies in several files."""
    return any(path.parent.glob(f"{path.name}.data")) or path.stat().st_size > 1.5e9


def _write_reference(path: Path, out: Path, to: DType, *, results: bool, draw: int | None = None) -> None:
    """Write a reference beside links to the data of the model, so that its weights are not loaded."""
    proto = onnx.load(path, load_external_data=not _large(path))
    for data in path.parent.glob(f"{path.name}.data*"):
        if not (out.parent / data.name).exists():
            os.link(data, out.parent / data.name)
    onnx.save(rounded_products(proto, to, results=results, draw=draw), out)


def _run(path: Path, batch: Batch) -> list[Any]:
    """Run a float32 model, or a twin; inputs are given in the types that it states."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.add_session_config_entry("session.disable_prepacking", "1")  # a second copy of the weights
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    fed = {i.name: batch[i.name].astype(_NUMPY.get(i.type, batch[i.name].dtype)) for i in session.get_inputs()}
    return list(session.run(None, fed))


_NUMPY = {"tensor(float16)": np.dtype(np.float16), "tensor(float)": np.dtype(np.float32)}


def _casts_on_cuda(models: Sequence[Path]) -> list[int | None]:
    """Return the Casts that onnxruntime is left with on CUDA; None without the stub, or where it refuses the model.

    Models of more than 400 MB are left out: the stub copies weights, and takes minutes for them.
    """
    if stub.folder()[0] is None or sum(file.stat().st_size for file in models[0].parent.iterdir()) > MAX_ON_CUDA:
        return [None] * len(models)
    return [row.get("casts") for row in stub.placements(models)]


MAX_ON_CUDA = 400e6 * 2
"""Bytes of our conversion and that of the other state."""
BATCHES = ("built", "masked")
"""The batches of the benchmark of architectures that count: as built, and with a row that is masked throughout."""


def _batches(path: Path) -> dict[str, Batch]:
    """Return the inputs of a model by batch: those beside it, else one that is drawn."""
    model = Model.load(path)
    beside = next(
        (p for p in (path.with_suffix(".npz"), path.with_name(f"{path.name.split('.')[0]}.npz")) if p.exists()), None
    )
    if beside is None:
        return {"drawn": dict(next(iter(Feed.randomly(model, shapes=_drawn_shapes(model)))))}
    stored = np.load(beside)
    # The files of tests/models and of the benchmark of architectures hold outputs as well.
    for prefixes in ({"built": "input/"}, {batch: f"{batch}/in/" for batch in BATCHES}):
        found = {batch: _below(stored, prefix) for batch, prefix in prefixes.items()}
        if any(found.values()):
            return {batch: inputs for batch, inputs in found.items() if inputs}
    return {"built": dict(next(iter(Feed.of(beside, model))))}


def _below(stored: Mapping[str, Array], prefix: str) -> Batch:
    return {name.removeprefix(prefix): stored[name] for name in stored if name.startswith(prefix)}


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


def _size(path: Path, to: DType, on_cuda: int | None) -> Size:
    """Return the size of a converted model that lies in a file."""
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
    """Convert with the package of another checkout; return the file of each type that it made."""
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
    """Return where the row of a model is kept."""
    return path.parent / "rows" / f"{path.stem}.{to.spelling}.json"


def rows(folder: Path, to: DType) -> list[Judged]:
    """Return the rows that a folder holds, by name of the model."""
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
    """Return one row of the table of two states."""
    if row.fault or row.before is None or row.size is None:
        return (row.model, *["–"] * 7, row.judgement)
    errors = [f"{row.shown(way):.1e}" for way in (BEFORE, "ours", "A", "B")]
    both = (row.before, row.size)
    casts = " → ".join(f"{size.casts}" + (f" ({size.on_cuda})" if size.on_cuda is not None else "") for size in both)
    shares = " → ".join(f"{each.operations:.0%}" for each in both)
    nbytes = f"{row.size.bytes / max(row.before.bytes, 1) - 1:+.1%}"
    return (row.model, *errors, casts, shares, nbytes, row.judgement)


def measured(path: Path, args: argparse.Namespace) -> None:
    """Measure a model in a process of its own and keep its rows."""
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
    """Print the rows of one model as JSON, a line for each type."""
    kept = {to: row for to in args.to for row in rows(path.parent, to) if row.model == path.stem and not row.fault}
    try:
        for _, row in judged(path, args, kept if len(kept) == len(args.to) else {}):
            print(json.dumps(asdict(row)), flush=True)
    except FAULTS as fault:
        print(" ".join(str(fault).split())[:160], file=sys.stderr)
        sys.exit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a folder of models; a model's file prints its rows alone, as JSON")
    parser.add_argument("--models", nargs="*", metavar="GLOB", default=["*"], help="the models to measure now")
    parser.add_argument("--to", nargs="+", default=[DType.FLOAT16], type=DType.parse)
    parser.add_argument("--suite", action="store_true", help="write the models of tests/suites/harm into FOLDER first")
    parser.add_argument("--again", action="store_true", help="measure our conversions of the models anew")
    parser.add_argument("--peers", type=Path)
    parser.add_argument("--autocast", type=Path)
    parser.add_argument("--before", type=Path, metavar="CHECKOUT")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds that one model may take")
    parser.add_argument("--memory", type=float, default=8.0, help="GB of memory that one model may take")
    args = parser.parse_args()
    if args.folder.suffix == ".onnx":
        one(args.folder, args)
        return
    args.folder.mkdir(parents=True, exist_ok=True)
    if args.suite:
        if len(args.to) > 1:
            parser.error("the suite has other models for each type; give one type")
        write_suite(args.folder, *args.to)
    chosen = {path for glob in args.models for path in args.folder.glob(f"{glob}.onnx")}
    for path in sorted(chosen):
        measured(path, args)
    for to in args.to:
        found = [row for row in rows(args.folder, to) if args.folder / f"{row.model}.onnx" in chosen]
        table = (COMPARED, map(compared, found)) if args.before is not None else (HEAD, map(cells, found))
        print("\n".join(measure.markdown(*table)))
        harmed = sum(row.judgement.startswith("harmed") for row in found)
        print(f"\n{len(found)} models to {to.spelling}: {harmed} harmed\n")


if __name__ == "__main__":
    main()
