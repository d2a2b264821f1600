"""Casts and predicted time of placement by minimum cut, by spreading colors, and by other converters.

    python benchmarks/run.py placement [CACHE] [--peers PYTHON] [--autocast PYTHON] [--go-on] [--models NAME ...]

Models are the exported ones in `tests/models`, those of the zoo that CACHE holds, and the made-up graphs of
`graphs.py`. Of each: Casts added, and the predicted time that a model takes beyond the cheapest run (Casts,
float32 where low is faster, lost fusions) on several GPUs, by every way to place and every other converter; and the
seconds of processor time that coloring takes. `--peers` is an interpreter with onnxruntime's converter, `--autocast`
one with nvidia-modelopt[onnx]: they are given the nodes that `auto` keeps in float32, and place the Casts between those
and the others. Where such a tool leaves a product in float32 nevertheless, `auto` is asked once more, that product
kept, so that both place Casts around the same ones ("auto as TOOL"). All models are judged by the same function, by
what stands in them. The costs are predictions from data sheets and shapes: nothing runs on a GPU here.

A tool that takes longer than `--limit` or more than `--memory` is stopped, and its row says so. Rows are written one by
one; `--go-on` leaves out those that results/placement.json has already.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from amp_rewrite import AmpRewriteError, Model, View, convert
from amp_rewrite.pipeline.convert import finish
from amp_rewrite.pipeline.draft import Draft
from amp_rewrite.runtime.roofline import ROOFS
from amp_rewrite.settings.choices import Placement
from amp_rewrite.settings.request import Request
from benchmarks.placement import graphs, judge
from benchmarks.shared import measure

FIXTURES = measure.ROOT / "tests" / "models"
NANOSECOND = 1e-3
"""In microseconds: what takes less than that longer is as fast. An exponent that stays float32 takes 6e-6 on a T4."""
MORE = 10.0
"""Seconds that a tool may take for each model after the first of one process."""


@dataclass(frozen=True, slots=True)
class Placed:
    """One model by one way or tool; `cost` in microseconds by GPU, `seconds` of processor time for coloring."""

    model: str
    nodes: int
    tool: str
    casts: int | None = None
    cost: Mapping[str, float] = field(default_factory=dict)
    low: int = 0
    compute: int = 0
    seconds: float | None = None
    fault: str = ""


def ways(gpus: Sequence[str]) -> list[str]:
    """The ways to place: a minimum cut depends on the GPU."""
    return ["propagate", "auto", *(f"mincut:{gpu}" for gpu in gpus)]


def own(path: Path, gpus: Sequence[str], chosen: Sequence[str]) -> list[Placed]:
    """What each way to place makes of a model. Colouring includes what inference of shapes it needs."""
    draft = Draft.of(path, Request.of(placement="auto", fuse="basic"))
    rows = []
    with tempfile.TemporaryDirectory(prefix="amp-rewrite-") as folder:
        for way in chosen:
            asked = replace(draft, request=Request({**vars(draft.request), "placement": Placement.parse(way)}))
            start = time.process_time()
            coloring = asked.paint()
            seconds = round(time.process_time() - start, 3)
            out = Path(folder) / "own.onnx"
            finish(asked, coloring).save(out, overwrite=True)
            priced = [way.partition(":")[2]] if ":" in way else gpus
            row = Placed(path.stem, len(draft.view.ops), way, seconds=seconds)
            rows.append(_with(row, judge.judged(out, path, priced)))
    return rows


def alike(path: Path, gpus: Sequence[str], tool: str, raised: Sequence[str]) -> Placed:
    """What `auto` makes of a model if it keeps those products, too."""
    with tempfile.TemporaryDirectory(prefix="amp-rewrite-") as folder:
        out = Path(folder) / "alike.onnx"
        convert(path, placement="auto", keep=[judge.pattern(name) for name in raised]).save(out)
        return _with(Placed(path.stem, 0, f"auto as {tool}"), judge.judged(out, path, gpus))


def _with(row: Placed, judged: judge.Judged) -> Placed:
    return replace(row, casts=judged.casts, cost=judged.cost, low=judged.low, compute=judged.compute)


@dataclass(frozen=True, slots=True)
class Tool:
    """Another converter: its interpreter, and how many seconds and bytes it may take."""

    name: str
    python: Path
    limit: float
    memory: float


def others(paths: Sequence[Path], gpus: Sequence[str], tool: Tool) -> Iterator[Placed]:
    """What another converter makes of models, several in one process, which goes on behind one at which it fails."""
    rest = list(paths)
    with tempfile.TemporaryDirectory(prefix="amp-rewrite-") as name:
        folder = Path(name)
        low = measure.apart(asked, rest, folder) if rest else {}
        while rest:
            jobs = [(path, folder / f"{path.stem}.onnx", folder / f"{path.stem}.kept") for path in rest]
            limit = tool.limit + MORE * (len(jobs) - 1)
            words = [word for job in jobs for word in job]
            run = measure.cost(
                [*measure.script("placement_tools", tool.python), tool.name, *words], limit=limit, memory=tool.memory
            )
            for path, out, _ in jobs:
                rest.remove(path)
                if not out.exists():
                    said = run.said.splitlines()[-1] if run.said else f"exit code {run.code}"
                    said = f"over the limit: {said}" if said.startswith("stopped") else said
                    yield Placed(path.stem, 0, tool.name, fault=said[:120])
                    break
                yield from _other(path, gpus, tool.name, out, low[path])
                for made in folder.glob(f"{out.name}*"):
                    made.unlink()


def asked(paths: Sequence[Path], folder: Path) -> dict[Path, list[str]]:
    """The products that `auto` lowers of each model; what it keeps in float32 goes into a file, one name a line."""
    lowered = {}
    for path in paths:
        source, converted = View.of(Model.load(path)), convert(path, placement="auto")
        (folder / f"{path.stem}.kept").write_text("\n".join(judge.kept(source, converted)), "utf-8")
        lowered[path] = judge.products(source, converted)
    return lowered


def _other(path: Path, gpus: Sequence[str], tool: str, out: Path, low: Sequence[str]) -> Iterator[Placed]:
    try:
        yield _with(Placed(path.stem, 0, tool), judge.judged(out, path, gpus))
        raised = judge.raised(out, low)
        if raised:
            yield alike(path, gpus, tool, raised)
    except AmpRewriteError as fault:
        yield Placed(path.stem, 0, tool, fault=" ".join(str(fault).split())[:120])


# -- what is seen ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Compared:
    """One model: who takes fewer Casts than `auto`, or by GPU less predicted time; whom it was compared with."""

    model: str
    others: tuple[str, ...]
    casts: tuple[str, ...]
    cost: tuple[str, ...]


def compared(rows: Sequence[Placed]) -> list[Compared]:
    """`auto` beside spreading and each tool that made a model; beside a tool that raised products, with those kept."""
    found = []
    for model in dict.fromkeys(row.model for row in rows):
        by = {row.tool: row for row in rows if row.model == model and row.casts is not None}
        rivals = [tool for tool in by if tool == "propagate" or tool in TOOLS]
        if "auto" not in by or not rivals:
            continue
        fewer, faster = [], []
        for tool in rivals:
            mine, theirs = by.get(f"auto as {tool}", by["auto"]), by[tool]
            if (theirs.casts or 0) < (mine.casts or 0):
                fewer.append(f"{tool}: {theirs.casts} against {mine.casts}")
            for gpu, cost in theirs.cost.items():
                if cost < mine.cost[gpu] - NANOSECOND:
                    faster.append(f"{tool} on {gpu}: {cost:.2f} against {mine.cost[gpu]:.2f}")
        found.append(Compared(model, tuple(rivals), tuple(fewer), tuple(faster)))
    return found


TOOLS = ("onnxruntime_float16", "modelopt_autocast")


def summary(rows: Sequence[Placed]) -> list[str]:
    """For each model, whether `auto` is above no other in Casts and in predicted time."""
    seen = compared(rows)
    never = sum(not (c.casts or c.cost) for c in seen)
    head = ["model", "compared with", "Casts never above", "predicted time never above", "who is below"]
    cells = (
        (
            c.model,
            ", ".join(c.others),
            "no" if c.casts else "yes",
            "no" if c.cost else "yes",
            "; ".join((*c.casts, *c.cost)),
        )
        for c in seen
    )
    return [f"`auto` is above no other in {never} of {len(seen)} models.", "", *measure.markdown(head, cells)]


def table(rows: Sequence[Placed], gpus: Sequence[str]) -> list[str]:
    """The lines of the results' table."""
    head = ["model", "nodes", "by", "Casts added", *(f"predicted µs, {gpu}" for gpu in gpus)]
    head += ["products low", "seconds of coloring", ""]
    cells = (
        (
            *(row.model, row.nodes or "", row.tool, "–" if row.casts is None else row.casts),
            *(f"{row.cost[gpu]:.2f}" if gpu in row.cost else "–" for gpu in gpus),
            "–" if row.casts is None else f"{row.low} of {row.compute}",
            *("" if row.seconds is None else f"{row.seconds:.3f}", row.fault.replace("|", "/")),
        )
        for row in rows
    )
    return measure.markdown(head, cells)


# -- the run ---------------------------------------------------------------------------------------------


@dataclass
class Rows:
    """The rows so far, written after each of them; `written` is whether they are written at all."""

    gpus: Sequence[str]
    written: bool
    rows: list[Placed] = field(default_factory=list)

    def add(self, row: Placed) -> None:
        self.rows.append(row)
        print(table([row], self.gpus)[-1], flush=True)
        if self.written:
            measure.write("placement", measure.machine(), self.rows, [*summary(self.rows), "", *self._table()])

    def _table(self) -> list[str]:
        return table(self.rows, self.gpus)

    def without(self, paths: Sequence[Path], tool: str) -> list[Path]:
        """The models that have no row by a tool."""
        done = {row.model for row in self.rows if row.tool == tool}
        return [path for path in paths if path.stem not in done]


def earlier() -> list[Placed]:
    """The rows of a run that was broken off."""
    path = measure.RESULTS / "placement.json"
    rows = json.loads(path.read_text("utf-8"))["rows"] if path.exists() else []
    if any(row.keys() != set(Placed.__dataclass_fields__) for row in rows):
        sys.exit(f"{path.name} has rows of an older form; run without --go-on")
    return [Placed(**row) for row in rows]


def run(batches: Sequence[Sequence[Path]], rows: Rows, tools: Sequence[Tool], chosen: Sequence[str]) -> None:
    """Every model by every way, then by every tool; the models of a batch share the processes of a tool."""
    for path in rows.without([path for batch in batches for path in batch], chosen[-1]):
        for row in measure.apart(own, path, rows.gpus, chosen):
            rows.add(row)
    for batch in batches:
        for tool in tools:
            for row in others(rows.without(batch, tool.name), rows.gpus, tool):
                rows.add(row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cache", type=Path, nargs="?")
    parser.add_argument("--nodes", type=int, default=100_000, help="of the made-up graphs; 0 for none")
    parser.add_argument("--gpu", nargs="+", default=["A100", "H200", "T4"], choices=list(ROOFS))
    parser.add_argument("--peers", type=Path)
    parser.add_argument("--autocast", type=Path)
    parser.add_argument("--models", nargs="*", help="only these exported models and models of the cache")
    parser.add_argument("--limit", type=float, default=180.0, help="seconds that a tool may take (default 180)")
    parser.add_argument("--memory", type=float, help="GB that a tool may take (default: four fifths of the machine's)")
    parser.add_argument("--go-on", action="store_true", help="keep the rows of a run that was broken off")
    parser.add_argument("--dry-run", action="store_true", help="print, but leave the results file alone")
    given = parser.parse_args()
    pythons = dict(zip(TOOLS, (given.peers, given.autocast), strict=True))
    memory = 0.8 * measure.memory() if given.memory is None else 1e9 * given.memory
    tools = [Tool(name, python, given.limit, memory) for name, python in pythons.items() if python]
    rows = Rows(given.gpu, not given.dry_run, earlier() if given.go_on else [])
    exported = _chosen(FIXTURES, given.models)
    real = _chosen(given.cache, given.models) if given.cache is not None else []
    run([exported, *([path] for path in real)], rows, tools, ways(given.gpu))
    with tempfile.TemporaryDirectory(prefix="amp-rewrite-") as name:
        for shape in graphs.SHAPES if given.nodes else ():
            path = Path(name) / f"{shape}_{given.nodes}.onnx"
            measure.apart(graphs.build, shape, given.nodes, str(path))
            run([[path]], rows, tools, ways(given.gpu[:1]))
            path.unlink()
    print("\n".join(["", *summary(rows.rows)]))


def _chosen(folder: Path, names: Sequence[str] | None) -> list[Path]:
    return [path for path in sorted(folder.glob("*.onnx")) if not names or path.stem in names]


if __name__ == "__main__":
    main()
