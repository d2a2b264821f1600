"""Make the models of the GPU measurement in every way, as skeletons without weights.

    python benchmarks/run.py gpu_make SKELETONS [NAME …] [--peers PYTHON] [--autocast PYTHON] [--limit 300]

The checkout includes float32 and other tools' conversions (`skeletons/`), so only this package's conversions are made,
from float32 models with drawn weights. `--anew` makes everything, which needs torch, transformers and onnxscript, and
`--keep` stores it in the checkout. A separate process makes each model. A way that fails, or that exceeds `--limit`
seconds or `--memory` gigabytes, is recorded with the reason. Existing and failed ways are left alone, except this
package's conversions from different code; `--ways` retries failed ways.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from benchmarks.gpu import gpu_models, skeleton, skeleton_files
from benchmarks.gpu.gpu_ways import WAYS, by_amp, by_peer, made_with, ways_of
from benchmarks.gpu.gpu_work import flops_of
from benchmarks.shared import measure

KEPT = measure.ROOT / "benchmarks" / "gpu" / "skeletons"
"""Archives of float32 and other tools' conversions, for comparison with any version of this package."""
SOURCES = ("amp_rewrite", "lists")
"""Folders with the conversion code."""
Array = np.ndarray[Any, Any]


def tree() -> str:
    """Return a digest of the conversion code, to recognize skeletons from different code."""
    digest = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted((measure.ROOT / folder).rglob("*")):
            if path.is_file() and path.suffix in (".py", ".yaml", ".json"):
                digest.update(f"{path.relative_to(measure.ROOT)}\0".encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def commit() -> str:
    """Return the last commit of the conversion code, with a "+" if files differ; or "unknown"."""
    try:
        done = [
            subprocess.run(
                ["git", *words, "--", *SOURCES], cwd=measure.ROOT, capture_output=True, text=True, check=True
            )
            for words in (["log", "-1", "--abbrev=12", "--format=%h"], ["status", "--porcelain"])
        ]
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    last, changed = (run.stdout.strip() for run in done)
    return (last + "+" * bool(changed)) or "unknown"


def split_batch(inputs: Mapping[str, Array]) -> tuple[dict[str, Any], dict[str, Array]]:
    """Return the inputs to draw by name, as shapes and spreads, and the inputs to store in a file."""
    large, small = {}, {}
    for key, array in inputs.items():
        if array.dtype.kind == "f" and array.size > skeleton.LEAST:
            large[key] = {"shape": list(array.shape), "mean": 0.0, "std": 1.0}
        else:
            small[key] = array
    return large, small


class Making:
    """The ways of one model, made one at a time. Each stays in the folder as a skeleton."""

    def __init__(self, name: str, out: Path, args: Mapping[str, Any]) -> None:
        self.name, self.out, self.args = name, out, args
        self.work = out / "work"
        self.work.mkdir(parents=True, exist_ok=True)
        self.source = self.work / f"{name}.float32.onnx"
        new = not is_there(out, name)
        if new:
            if args["anew"] or not kept(name).exists():
                self._begin()
            else:
                skeleton_files.unpack(kept(name), out)
        self.about, self.recipes = skeleton_files.about(out, name), skeleton_files.recipes(out, name)
        self.sources = skeleton.Sources(self.recipes["sources"])
        self.sources.recall(self.recipes)
        if new or self.about["tree"] != tree():
            self._forget_own()

    @cached_property
    def model(self) -> gpu_models.Source:
        """The model in its framework, with the weights of its skeletons, if any."""
        there = is_there(self.out, self.name)
        return gpu_models.source(self.name, skeleton_files.recipes(self.out, self.name)["sources"] if there else None)

    def _begin(self) -> None:
        """Record the distributions of weights and inputs, without any ways."""
        inputs, small = split_batch(self.model.inputs)
        shapes = {key: list(array.shape) for key, array in self.model.inputs.items()}
        np.savez_compressed(self.out / f"{self.name}.npz", **small)
        about = {"name": self.name, "tree": tree(), "commit": commit(), "ways": {}, "missing": {}, "inputs": shapes}
        recipes = {"sources": dict(self.model.drawn), "inputs": inputs, "scales": [], "ways": {}}
        skeleton_files.note(self.out, self.name, about, recipes)

    def _forget_own(self) -> None:
        """Drop this package's own ways, made by different code."""
        self.about |= {"tree": tree(), "commit": commit()}
        for key in own_ways():
            for noted in (self.about["ways"], self.about["missing"], self.recipes["ways"]):
                noted.pop(key, None)
            skeleton_files.file_of(self.out, self.name, key).unlink(missing_ok=True)

    def run(self) -> None:
        """Make every missing way, and remove the models."""
        for way in self._made():
            self._strip(way)
            self._write()
        self._write()  # including ways that could not be made
        for path in self.work.glob(f"{self.name}.*"):
            path.unlink()

    def _write(self) -> None:
        self.recipes["scales"] = self.sources.scales
        skeleton_files.note(self.out, self.name, self.about, self.recipes)

    def _made(self) -> Iterator[str]:
        """Yield each successful way; float32 comes first, since the others are made from it."""
        wanted = open_ways(self.about, self.args.get("ways"))
        for key in dict.fromkeys(["float32", *wanted]) if wanted else ():
            target, start = self.work / f"{self.name}.{key}.onnx", time.perf_counter()
            try:
                self._make(key, target)
            except Exception as fault:  # exporters and converters raise any error
                if key == "float32":
                    raise
                self.about["missing"][key] = " ".join(str(fault).split())[:200] or type(fault).__name__
                print(f"{self.name}, {key}: not made: {self.about['missing'][key]}", flush=True)
                continue
            self.about["missing"].pop(key, None)
            if key in wanted:
                self.about["ways"][key] = {"seconds": round(time.perf_counter() - start, 1)}
                if WAYS[key].packages:
                    self.about["ways"][key]["with"] = made_with(WAYS[key], self.args)
                yield key

    def _make(self, key: str, target: Path) -> None:
        way = WAYS[key]
        if way.options is not None:
            by_amp(way, self.source, target)
        elif way.tool:
            self.sources.forget()
            by_peer(way, self.name, self.source, target, self.args)
        elif key == "torch_half":
            self.model.write_half(target)
            del self.model
        elif key in self.about["ways"]:
            self._grow(target)
        else:
            self.model.write(target)

    def _grow(self, target: Path) -> None:
        """Write the existing float32 model with its weights."""
        model = skeleton_files.stripped(self.out, self.name, "float32")
        skeleton.fill(model, self.recipes["ways"]["float32"], self.sources)
        skeleton_files.save(model, target)

    def _strip(self, key: str) -> None:
        """Write the skeleton of a way, and delete its file."""
        path = self.work / f"{self.name}.{key}.onnx"
        model = onnx.load(path)
        found = skeleton.strip(model, self.sources)
        self.recipes["ways"][key] = found.recipes
        skeleton_files.file_of(self.out, self.name, key).write_bytes(model.SerializeToString())
        entry = self.about["ways"][key]
        entry |= {"nodes": len(model.graph.node), "left": found.left}
        if key == "float32":
            self.about["flops"] = flops_of(model, self.about["inputs"])
        print(
            f"{self.name}, {key}: {entry['seconds']:.0f} s, {entry['nodes']} nodes, {len(found.recipes)} tensors drawn,"
            f" {found.left / 1e6:.2f} MB remain",
            flush=True,
        )
        if key != "float32":
            for file in (path, path.with_name(path.name + ".data")):
                file.unlink(missing_ok=True)


def kept(name: str) -> Path:
    """Return the archive of a model's skeletons independent of this package's code."""
    return KEPT / f"{name}{skeleton_files.ARCHIVE}"


def own_ways() -> list[str]:
    """Return this package's own ways."""
    return [key for key, way in WAYS.items() if way.options is not None]


def keep(out: Path, name: str) -> None:
    """Store a model's other ways in the checkout, including float32."""
    KEPT.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="amp-rewrite-") as scratch:
        skeleton_files.select(out, name, [key for key in WAYS if key not in own_ways()], Path(scratch))
        skeleton_files.pack(Path(scratch), name, kept(name))


def is_there(out: Path, name: str) -> bool:
    """Return True if a folder has skeletons of a model."""
    return (out / f"{name}.json").exists() and (out / f"{name}.recipes.json").exists()


def of_this_code(out: Path, name: str) -> bool:
    """Return True if a folder has skeletons of a model, converted by this checkout's code."""
    return is_there(out, name) and bool(skeleton_files.about(out, name)["tree"] == tree())


def open_ways(about: Mapping[str, Any], named: Sequence[str] | None) -> list[str]:
    """Return the ways to make: those not tried yet, and the failed ways in `named`."""
    tried = about["ways"].keys() | (set() if named else about["missing"].keys())
    chosen = ["float32", *named] if named else ways_of(about["name"])
    return [key for key, way in WAYS.items() if not way.file and key not in tried and key in chosen]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*", help="models to make (default: all, in the order of measurement)")
    parser.add_argument("--ways", nargs="+", choices=[key for key, way in WAYS.items() if not way.file])
    parser.add_argument("--peers", help="Python with onnxconverter-common, onnxruntime and sympy")
    parser.add_argument("--autocast", help="Python with nvidia-modelopt[onnx]")
    parser.add_argument("--limit", type=float, default=300, help="time limit of another tool per model, in seconds")
    parser.add_argument("--memory", type=float, default=16, help="memory limit of another tool, in gigabytes")
    parser.add_argument("--workers", type=int, default=1, help="models at a time; each takes several GB")
    parser.add_argument("--anew", action="store_true", help="ignore the skeletons in the checkout")
    parser.add_argument("--keep", action="store_true", help="store all but this package's ways in the checkout")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    if args.one:
        try:
            Making(args.names[0], args.out, {**vars(args), "memory": args.memory * 1e9}).run()
        except ImportError as missing:
            sys.exit(f"{args.names[0]} needs {missing.name}; run `make extras`")
        return
    known = [*gpu_models.REAL, *gpu_models.TINY]
    names = args.names or list(gpu_models.REAL)
    unknown = [name for name in names if name not in known]
    if unknown:
        sys.exit(f"there is no model {unknown[0]!r}; choose from {', '.join(known)}")
    with ThreadPoolExecutor(args.workers) as pool:
        failed = [name for name, done in zip(names, pool.map(partial(stored, args), names), strict=True) if not done]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def stored(args: argparse.Namespace, name: str) -> bool:
    """Make a model's missing ways, and store the other ways if asked; return False after a failure."""
    if of_this_code(args.out, name) and not open_ways(skeleton_files.about(args.out, name), args.ways):
        print(f"{name}: already made", flush=True)
    elif not made(name, args):
        return False
    if args.keep:
        keep(args.out, name)
        print(f"{kept(name)}: {kept(name).stat().st_size / 1e6:.2f} MB", flush=True)
    return True


def made(name: str, args: argparse.Namespace) -> bool:
    """Make the ways of a model in a separate process; return True if it succeeds."""
    words = [args.out, name, "--one", "--limit", args.limit, "--memory", args.memory]
    words += ["--ways", *args.ways] if args.ways else []
    words += ["--anew"] if args.anew else []
    for word in ("peers", "autocast"):
        words += [f"--{word}", getattr(args, word)] if getattr(args, word) else []
    command = [str(word) for word in (*measure.script("gpu_make"), *words)]
    return subprocess.run(command, check=False).returncode == 0


if __name__ == "__main__":
    main()
