"""Architectures from both of PyTorch's exporters, converted in nine ways: loading, errors, Casts.

    python benchmarks/run.py architectures FOLDER [NAME ...] [--peers PYTHON] [--limit SECONDS]

This needs torch, transformers and onnxscript in this interpreter, and downloads nothing. FOLDER keeps the exported
models and their rows, and an interrupted run resumes where it stopped. Every export and every measurement is a separate
process with a time limit, so a crash or a hang affects only one. `--peers` is an interpreter with onnxconverter-common
and onnxruntime, whose converters get the same models (see `peers/peer_tools.py`).

The models are small, with random weights of the magnitude of trained ones: this finds wrong conversions, not the
accuracy of trained models. Errors are L2 errors relative to the float32 model's outputs, the largest over all outputs
and batches; low precision is emulated.
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
# The largest error of an export; a wrong export says nothing about a conversion.
EXPORT_NEAR = 1e-3
# An error counts as more than rounding from this factor over the best of PyTorch, only the products, and the peers.
TIMES = 4.0
# Not only rounding: a choice (the nearest code, the best expert) went the other way.
FAR = 0.05
HEAD = (
    *("architecture", "exporter", "opset", "ops", "products low", "Casts added, ours / fewest other"),
    *("error float16", "PyTorch's float16", "best other", "error bfloat16", "PyTorch's bfloat16", "status"),
)


def exported(folder: Path, names: Sequence[str], limit: float) -> None:
    """Export the missing models."""
    command = [*measure.script("export"), folder, *names, "--limit", str(limit)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def of_peers(model: Path, python: Path | None, limit: float) -> list[Path]:
    """Convert a model with the other converters; return the files."""
    found = []
    for tool in PEERS if python is not None else ():
        out = model.parent / "peers" / f"{model.stem}.{tool}.onnx"
        out.parent.mkdir(exist_ok=True)
        if not out.exists():
            measure.cost([*measure.script("peer_tools", python), tool, model, out], limit=limit)
        found += [out] if out.exists() else []
    return found


def measured(model: Path, peers: Sequence[Path], limit: float) -> dict[str, Any]:
    """Return a model's rows by way; "end" is the exit of the measuring process."""
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
    """Return the largest L2 error of a row: infinity for lost numbers, NaN without a comparison."""
    found = (row or {}).get("errors") or {}
    if any(broken for _, _, broken in found.values()):
        return math.inf
    return max((l2 for _, l2, _ in found.values()), default=math.nan)


def status(rows: Mapping[str, Any]) -> str:
    """Return the faults of an export or its conversions; "right" if there are none."""
    if (code := rows["end"]["rc"]) != 0:
        return f"the measurement exited with {code}"
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
    """Return the lowest error of the others in this type; for bfloat16, 8 times their float16 error also counts."""
    others = [error(rows.get(f"torch-{kind}"))]
    scale = 1.0 if kind == "float16" else 8.0
    others += [scale * error(rows.get(way)) for way in ("products", *PEERS)]
    return min((e for e in others if e > 0), default=math.inf)


def cells(rows: Mapping[str, Any]) -> tuple[object, ...]:
    """Return a row of the table."""
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


def summary(found: Sequence[Mapping[str, Any]], exports: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the counts as sentences."""
    judged = Counter("right" if status(rows) == "right" else "other" for rows in found)
    tried = sum(2 for _ in exports)
    real = [rows for rows in found if not status(rows).startswith("the export")]
    ways = [rows[way] for rows in real for way in WAYS if way in rows]
    opened = sum(not any(_faults(row)) for row in ways)
    return [
        f"{len(exports)} architectures; {len(found)} of {tried} exports succeeded, {len(real)} of them correctly. "
        f"Of their {len(ways)} conversions, {opened} pass the checker, open and run; "
        f"{judged['right']} exports are right in every way.",
        "",
        f"PyTorch's: the module in that type, run by PyTorch on the CPU. Other: the best of {', '.join(PEERS)}, with "
        "the Casts of models that run. Casts of constants are not counted, since runtimes fold them.",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--peers", type=Path)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds per export and measurement")
    parser.add_argument("--exported", action="store_true", help="use the models in FOLDER, without exporting")
    args = parser.parse_args()
    if not args.exported:
        exported(args.folder, args.names, args.limit)
    models = sorted(args.folder.glob("*.onnx"))
    chosen = [m for m in models if not args.names or m.name.split(".")[0] in args.names]
    found = []
    for model in chosen:
        found.append(measured(model, of_peers(model, args.peers, args.limit), args.limit))
        print(*cells(found[-1]), sep="  ", flush=True)
    exports = [json.loads(path.read_text("utf-8")) for path in sorted(args.folder.glob("*.json"))]
    table = [*summary(found, exports), "", *measure.markdown(HEAD, map(cells, found))]
    if not args.names:
        about = measure.machine(("torch", "transformers", "onnxscript", "onnxruntime-gpu"))
        measure.write("architectures", about, [dict(zip(HEAD, cells(rows), strict=True)) for rows in found], table)
    print("\n".join(table))


if __name__ == "__main__":
    main()
