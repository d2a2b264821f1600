"""Pack one folder for measuring on a machine without a network, in addition to this checkout.

    python benchmarks/run.py gpu_pack SKELETONS [--out .gpu] [--megabytes 55]     # `make gpu-pack` makes both

The folder contains onnxruntime-gpu for the machine's Python with the code for only one GPU architecture, small wheels
that the machine may lack, and the skeletons of `gpu_make` that the checkout lacks. If the folder and the checkout
together exceed `--megabytes`, the command fails and names the largest files. `gpu_remote` unpacks the folder.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import lzma
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import fatbin, skeleton_files
from benchmarks.gpu.gpu_make import commit, kept, tree
from benchmarks.shared import measure

RUNTIME = "ort.tar.xz"
ABOUT = "pack.json"
PROVIDER = "libonnxruntime_providers_cuda.so"
LEFT_OUT = ("capi/libonnxruntime.so*", "capi/libonnxruntime_providers_tensorrt.so")
LEFT_OUT += ("datasets", "quantization", "tools", "transformers")
"""Parts of onnxruntime that Python does not load, or no row uses."""
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
WHEELS = ("click>=8.2", "networkx>=3.3,<4", "rich>=13.7", "flatbuffers", "nvidia-ml-py")
FILTERS = [
    {"id": lzma.FILTER_X86},
    {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 64 << 20},
]
NAMED = 8
"""The number of files to name in the error."""


def download(requirements: Sequence[str], folder: Path, python: str) -> None:
    """Download the wheels of some packages, without dependencies, for another Python on Linux."""
    words = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    words += ["--only-binary=:all:", "--python-version", python, "--implementation", "cp", "-d", str(folder)]
    for platform in PLATFORMS:
        words += ["--platform", platform]
    done = subprocess.run([*words, *requirements], capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["without a message"])[-1]
        raise LookupError(f"pip found no wheel of {', '.join(requirements)} for Python {python}: {reason}")


def pack_runtime(wheel: Path, others: Sequence[Path], target: Path, keep: Sequence[int]) -> dict[str, object]:
    """Write an archive of onnxruntime-gpu, with code for only some architectures, and of other wheels."""
    with tempfile.TemporaryDirectory(prefix="amp-rewrite-", dir=target.parent) as scratch:
        root = Path(scratch) / "root"
        for path in (wheel, *others):
            with zipfile.ZipFile(path) as archive:
                archive.extractall(root / ("site" if path == wheel else f"wheels/{path.name.partition('-')[0]}"))
        for path in list((root / "wheels").glob("*/*/**/tests")):
            shutil.rmtree(path)
        libraries = root / "site" / "onnxruntime" / "capi"
        whole = Path(scratch) / PROVIDER
        (libraries / PROVIDER).rename(whole)
        kept = fatbin.blanked(whole, libraries / PROVIDER, keep)
        for pattern in LEFT_OUT:
            for path in (root / "site" / "onnxruntime").glob(pattern):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        with lzma.open(target, "wb", filters=FILTERS) as packed, tarfile.open(fileobj=packed, mode="w") as out:
            out.add(root, ".")
    return kept


def runtime(args: argparse.Namespace, old: dict[str, Any]) -> dict[str, Any]:
    """Pack onnxruntime-gpu, unless the folder already has it; return a description of it."""
    wanted = {"version": importlib.metadata.version("onnxruntime-gpu"), "python": args.python, "keep": args.keep}
    target = args.out / RUNTIME
    if target.exists() and {key: old.get("runtime", {}).get(key) for key in wanted} == wanted:
        return dict(old["runtime"])
    with tempfile.TemporaryDirectory(prefix="amp-rewrite-") as scratch:
        wheel, others = args.wheel, Path(scratch) / "others"
        if wheel is None:
            download([f"onnxruntime-gpu=={wanted['version']}"], Path(scratch), args.python)
            wheel = next(Path(scratch).glob("*.whl"))
        download(WHEELS, others, args.python)
        return {**wanted, **pack_runtime(wheel, sorted(others.glob("*.whl")), target, args.keep)}


def skeletons(source: Path, target: Path) -> dict[str, Any]:
    """Pack the skeletons of each model; return its ways, and the missing ways with their reasons."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    found = {}
    for name in skeleton_files.names_in(source):
        skeleton_files.pack(source, name, target / f"{name}{skeleton_files.ARCHIVE}", kept(name))
        about = skeleton_files.about(source, name)
        found[name] = {"tree": about["tree"], "ways": list(about["ways"]), "missing": about["missing"]}
    return found


def tree_files() -> list[Path]:
    """Return the files of the checkout to copy: tracked files, and new files that are not ignored."""
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(words, cwd=measure.ROOT, capture_output=True, check=False)
    if done.returncode:
        sys.exit(f"{measure.ROOT} is not a git checkout, which determines the files to copy")
    paths = (measure.ROOT / name for name in done.stdout.decode("utf-8", "surrogateescape").split("\0") if name)
    return [path for path in paths if path.is_file()]


def size_error(files: Sequence[Path], most: float) -> str:
    """Return an error with the largest files if the total is too large, or else ""."""
    sizes = {path: path.stat().st_size for path in files}
    total = sum(sizes.values()) / 1e6
    if total <= most:
        return ""
    largest = sorted(sizes, key=lambda path: -sizes[path])[:NAMED]
    named = "\n".join(f"  {sizes[path] / 1e6:6.1f} MB  {path}" for path in largest)
    return f"{total:.1f} MB exceed the limit of {most:g}; leave out some files, such as a model's skeletons:\n{named}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("skeletons", type=Path)
    parser.add_argument("--out", type=Path, default=measure.ROOT / ".gpu")
    parser.add_argument("--megabytes", type=float, default=55.0, help="limit, including the checkout (default: 55)")
    parser.add_argument("--python", default="3.12", help="the machine's Python (default: 3.12)")
    parser.add_argument(
        "--keep", type=int, nargs="+", default=[90], help="GPU architectures (default: 90, H100 and H200)"
    )
    parser.add_argument("--wheel", type=Path, help="onnxruntime-gpu for that Python, instead of a download")
    parser.add_argument("--no-runtime", action="store_true", help="leave out onnxruntime-gpu")
    args = parser.parse_args()
    if not skeleton_files.names_in(args.skeletons):
        sys.exit(f"{args.skeletons} has no skeletons; run `gpu_make` to write them")
    args.out.mkdir(parents=True, exist_ok=True)
    about = args.out / ABOUT
    old = json.loads(about.read_text("utf-8")) if about.exists() else {}
    packed: dict[str, Any] = {"tree": tree(), "commit": commit()}
    try:
        packed["runtime"] = {} if args.no_runtime else runtime(args, old)
    except (LookupError, fatbin.FormatError) as fault:
        sys.exit(str(fault))
    packed["skeletons"] = skeletons(args.skeletons, args.out / "skeletons")
    files = [path for path in sorted(args.out.rglob("*")) if path.is_file() and path != about]
    packed["sha256"] = {str(p.relative_to(args.out)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}
    about.write_text(json.dumps(packed, indent=1) + "\n", encoding="utf-8")
    for name, found in packed["skeletons"].items():
        stale = "" if found["tree"] == packed["tree"] else "; made by different code"
        print(f"{name}: {', '.join(found['ways'])}{stale}")
        for way, why in found["missing"].items():
            print(f"  failed: {way}: {why}")
    if error := size_error([*files, about, *tree_files()], args.megabytes):
        sys.exit(error)
    own = sum(path.stat().st_size for path in (*files, about)) / 1e6
    whole = own + sum(path.stat().st_size for path in tree_files()) / 1e6
    print(f"{args.out}: {own:.1f} MB, with the checkout {whole:.1f} of {args.megabytes:g} MB")


if __name__ == "__main__":
    main()
