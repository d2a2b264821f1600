"""Restore models from skeletons, with weights drawn to the same bits as the originals.

    python benchmarks/run.py gpu_grow SKELETONS FOLDER [--only NAME …] [--workers 8]

It writes NAME.WAY.onnx, with one weights file for all ways of a model, NAME.npz with its batch, and NAME.json with the
distributions of its weights, from which PyTorch draws those of its module.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from benchmarks.gpu import gpu_models, skeleton_files
from benchmarks.gpu.gpu_make import tree


def grow(skeletons: Path, folder: Path, name: str) -> str:
    """Write the ways of one model, then the facts about them; return a line about the model."""
    start = time.perf_counter()
    nbytes = skeleton_files.regrow(skeletons, folder, name)
    noted = skeleton_files.about(skeletons, name) | {"sources": skeleton_files.recipes(skeletons, name)["sources"]}
    (folder / f"{name}.json").write_text(json.dumps(noted), encoding="utf-8")
    return f"{name}: {nbytes / 1e6:.0f} MB, {time.perf_counter() - start:.0f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("skeletons", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("--workers", type=int, default=8, help="models at a time; each takes several GB")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    names = sorted(args.only or skeleton_files.names_in(args.skeletons), key=gpu_models.place)
    if not names:
        sys.exit(f"{args.skeletons} has no skeletons; run `gpu_make` to write them")
    here = tree()
    old = [name for name in names if skeleton_files.about(args.skeletons, name)["tree"] != here]
    if old:
        print(f"made by different code: {', '.join(old)}; their rows measure that code", flush=True)
    with ProcessPoolExecutor(args.workers, get_context("spawn")) as pool:
        begun = {name: pool.submit(grow, args.skeletons, args.folder, name) for name in names}
        for name, done in begun.items():
            fault = done.exception()
            print(done.result() if fault is None else f"{name}: skipped: {fault}", flush=True)
    if all(done.exception() is not None for done in begun.values()):
        sys.exit("no model could be grown")


if __name__ == "__main__":
    main()
