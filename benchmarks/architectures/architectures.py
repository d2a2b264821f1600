"""Architectures by both exporters of PyTorch, converted in nine ways: load, errors, Casts.

    python benchmarks/run.py architectures FOLDER [NAME ...] [--peers PYTHON] [--limit SECONDS]

Needs torch, transformers and onnxscript in this interpreter; downloads nothing. FOLDER keeps the exported models and
the rows of each, and a run that is broken off goes on where it stopped. Every architecture and every measurement is a
process of its own with a limit: a crash or a hang costs that one alone. `--peers` is an interpreter with
onnxconverter-common and onnxruntime, whose converters are given the same models (see `peers/peer_tools.py`).

The models are small and their weights random, of the size of trained ones: this finds what is converted wrongly, not
how exact a trained model stays. Errors are L2 relative to what the float32 model gives, the largest of all outputs and
batches; low precision is emulated.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.shared import measure

PEERS = ("onnxconverter_common", "onnxruntime_float16", "onnxruntime_onnxmodel")
WAYS = ("float16", "bfloat16", "lower-all", "force-all", "fuse-none", "fuse-contrib", "opset-auto", "bfloat16-contrib")
# An export that is not the model to begin with says nothing of a conversion.
EXPORT_NEAR = 1e-3
# What counts as more than rounding: this many times the best of PyTorch's own half, the products alone, the others.
TIMES = 4.0
# No rounding alone: a choice (the nearest code, the best expert) went the other way.
FAR = 0.05
HEAD = (
    *("architecture", "exporter", "opset", "ops", "products low", "Casts added, ours / fewest other"),
    *("error float16", "PyTorch's float16", "best other", "error bfloat16", "PyTorch's bfloat16", "status"),
)


def exported(folder: Path, names: Sequence[str], limit: float) -> None:
    """Export what is not there yet."""
    command = [*measure.script("export"), folder, *names, "--limit", str(limit)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def of_peers(model: Path, python: Path | None, limit: float) -> list[Path]:
    """What the other converters make of a model, each a file."""
    found = []
    for tool in PEERS if python is not None else ():
        out = model.parent / "peers" / f"{model.stem}.{tool}.onnx"
        out.parent.mkdir(exist_ok=True)
        if not out.exists():
            measure.cost([*measure.script("peer_tools", python), tool, model, out], limit=limit)
        found += [out] if out.exists() else []
    return found


def measured(model: Path, peers: Sequence[Path], limit: float) -> dict[str, Any]:
    """The rows of a model by way; "end" says how the process ended that measured them."""
    kept = model.parent / "rows" / f"{model.stem}.jsonl"
    kept.parent.mkdir(exist_ok=True)
    if not kept.exists():
        part = kept.with_suffix(".part")
        run = measure.cost([*measure.script("conversions"), model, *peers], stdout=part, limit=limit)
        with part.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"way": "end", "rc": run.code, "said": run.said[-200:]}) + "\n")
        part.rename(kept)
    rows = map(json.loads, kept.read_text("utf-8").splitlines())
    return {row["way"]: row for row in rows}


def error(row: Mapping[str, Any] | None) -> float:
    """The largest error of a row in L2; infinite where a number was lost, NaN where nothing was compared."""
    found = (row or {}).get("errors") or {}
    if any(broken for _, _, broken in found.values()):
        return math.inf
    return max((l2 for _, l2, _ in found.values()), default=math.nan)


def status(rows: Mapping[str, Any]) -> str:
    """What is wrong with an export or its conversions; "right" if nothing is."""
    if (code := rows["end"]["rc"]) != 0:
        return f"the measurement ended with {code}"
    if "fault" in rows["float32"]:
        return "the export does not run"
    built = rows["float32"]["errors"].get("built")
    if built is None or not built[1] < EXPORT_NEAR:
        return "the export is not the model"
    faults = [f"{way}: {why}" for way in WAYS for why in _faults(rows[way])]
    for kind in ("float16", "bfloat16"):
        if error(rows[kind]) > TIMES * yardstick(rows, kind):
            faults.append(f"{kind}: {error(rows[kind]):.1e}")
        elif error(rows[kind]) > FAR:
            faults.append(f"{kind}: as far off as the others")
    return "; ".join(faults) or "right"


def _faults(row: Mapping[str, Any]) -> Iterator[str]:
    for key in ("fault", "checker", "opens", "emulation"):
        if key in row:
            yield f"{key}: {row[key][:80]}"


def yardstick(rows: Mapping[str, Any], kind: str) -> float:
    """The least error that somebody else has in this type; where only PyTorch has, bfloat16's 8 times float16's."""
    others = [error(rows.get(f"torch-{kind}"))]
    scale = 1.0 if kind == "float16" else 8.0
    others += [scale * error(rows.get(way)) for way in ("products", *PEERS)]
    return min((e for e in others if e > 0), default=math.inf)


def cells(rows: Mapping[str, Any]) -> tuple[object, ...]:
    """One row of the table."""
    before, half = rows["float32"], rows.get("float16", {})
    run = [row for row in (rows.get(peer, {}) for peer in PEERS) if "errors" in row and "opens" not in row]
    added = [row["casts"] - before["casts"] for row in (half, *run) if "casts" in row]
    best = min((error(rows.get(p)) for p in PEERS if not math.isnan(error(rows.get(p)))), default=math.nan)
    return (
        *(before["architecture"], before["exporter"], before.get("opset", "–"), before.get("nodes", "–")),
        f"{half.get('low', '–')} of {half.get('compute', '–')}",
        f"{added[0] if added else '–'} / {min(added[1:], default='–')}",
        *(_number(e) for e in (error(half), error(rows.get("torch-float16")), best)),
        *(_number(error(rows.get(kind))) for kind in ("bfloat16", "torch-bfloat16")),
        status(rows).replace("|", "/"),
    )


def _number(e: float) -> str:
    return "–" if math.isnan(e) else "not finite" if math.isinf(e) else f"{e:.1e}"


def summary(found: Sequence[Mapping[str, Any]], said: Sequence[Mapping[str, Any]]) -> list[str]:
    """How many there were of what, in words."""
    judged = Counter("right" if status(rows) == "right" else "other" for rows in found)
    tried = sum(2 for _ in said)
    real = [rows for rows in found if not status(rows).startswith("the export")]
    ways = [rows[way] for rows in real for way in WAYS if way in rows]
    opened = sum(not any(_faults(row)) for row in ways)
    return [
        f"{len(said)} architectures; {len(found)} of {tried} exports, {len(real)} of them the model that was exported. "
        f"Of {len(ways)} conversions of those {opened} pass the checker, open and run; "
        f"{judged['right']} exports are right in all.",
        "",
        f"PyTorch's: the module in that type, run by PyTorch on the CPU. Other: the best of {', '.join(PEERS)}; "
        "Casts of those whose models run. A Cast of constants is not counted: runtimes fold it.",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--peers", type=Path)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for each export and measurement")
    parser.add_argument("--exported", action="store_true", help="take the models that FOLDER holds, export none")
    args = parser.parse_args()
    if not args.exported:
        exported(args.folder, args.names, args.limit)
    models = sorted(args.folder.glob("*.onnx"))
    chosen = [m for m in models if not args.names or m.name.split(".")[0] in args.names]
    found = []
    for model in chosen:
        found.append(measured(model, of_peers(model, args.peers, args.limit), args.limit))
        print(*cells(found[-1]), sep="  ", flush=True)
    said = [json.loads(path.read_text("utf-8")) for path in sorted(args.folder.glob("*.json"))]
    table = [*summary(found, said), "", *measure.markdown(HEAD, map(cells, found))]
    if not args.names:
        about = measure.machine(("torch", "transformers", "onnxscript", "onnxruntime-gpu"))
        measure.write("architectures", about, [dict(zip(HEAD, cells(rows), strict=True)) for rows in found], table)
    print("\n".join(table))


if __name__ == "__main__":
    main()
