"""Dump the kernel registry of releases of onnxruntime-gpu from their wheels, without a GPU.

python tools/dump_releases.py FOLDER [RELEASE …]   writes FOLDER/RELEASE.json, by default for all since 1.20

Each wheel has about 300 MB. They are downloaded, unpacked, queried and deleted one at a time, so this never runs in CI.
The registry lists the kernels registered by the provider libraries when they are loaded. Empty libraries with the
required names and symbols replace CUDA and TensorRT. No kernel runs.

This needs gcc, nm and readelf on Linux, and wheels for the running Python.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections import defaultdict
from pathlib import Path

from amp_rewrite.runtime.kernels import release_number

PACKAGE = "onnxruntime-gpu"
OLDEST = (1, 20)
ROOT = Path(__file__).resolve().parent.parent

# Driver symbols looked up by CUTLASS's static initializers.
DRIVER = [
    "cuDeviceGetAttribute",
    "cuFuncSetAttribute",
    "cuFuncSetCacheConfig",
    "cuGetErrorName",
    "cuLaunchCooperativeKernel",
    "cuLaunchKernel",
    "cuLinkAddData_v2",
    "cuLinkAddFile_v2",
    "cuLinkComplete",
    "cuLinkCreate_v2",
    "cuLinkDestroy",
    "cuModuleGetFunction",
    "cuModuleLoadData",
    "cuModuleUnload",
]
BODIES = {
    "__cudaRegisterFatBinary": "void **__cudaRegisterFatBinary(void *image) { static void *h[4]; return h; }",
    "cudaGetDeviceCount": "int cudaGetDeviceCount(int *count) { *count = 1; return 0; }",
}

PROGRAM = """
import json, sys
from registry import kernel_registry
json.dump(kernel_registry(), open(sys.argv[1], "w"))
"""


def main() -> None:
    """Dump the releases named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("releases", nargs="*")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    for release in args.releases or releases():
        file = args.folder / f"{release}.json"
        if file.exists():
            continue
        with tempfile.TemporaryDirectory(prefix="wheel-") as scratch:
            dump = dumped(release, Path(scratch))
        file.write_text(json.dumps({"runtime": f"{PACKAGE} {release}", **dump}) + "\n")
        cuda = sum(kernel["provider"] == "CUDAExecutionProvider" for kernel in dump["kernels"])
        print(f"{release}: {cuda} CUDA kernels, opset {dump['opset']}, IR {dump['ir']}", flush=True)


def releases() -> list[str]:
    """Return the releases in the index since 1.20, oldest first."""
    output = run("-m", "pip", "index", "versions", PACKAGE).stdout
    listed = re.search(r"Available versions: (.*)", output)
    if listed is None:
        raise SystemExit(f"pip lists no versions of {PACKAGE}: {output}")
    names = [name.strip() for name in listed[1].split(",")]
    return sorted((name for name in names if release_number(name) >= OLDEST), key=release_number)


def dumped(release: str, scratch: Path) -> dict[str, object]:
    """Return the dump of a release, with an empty folder for scratch files."""
    run("-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), f"{PACKAGE}=={release}")
    wheel = next(scratch.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(scratch / "wheel")
    wheel.unlink()
    stand_ins = scratch / "libraries"
    stand_ins.mkdir()
    make_libraries(scratch / "wheel" / "onnxruntime" / "capi", stand_ins)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(scratch / "wheel"), str(ROOT), str(ROOT / "tools")]),
        "LD_LIBRARY_PATH": str(stand_ins),
    }
    answer = scratch / "answer.json"
    run("-c", PROGRAM, str(answer), environment=environment)
    dump: dict[str, object] = json.loads(answer.read_text())
    return dump


def make_libraries(capi: Path, folder: Path) -> None:
    """Compile an empty stand-in for each CUDA, cuDNN and TensorRT library that the wheel's providers need."""
    compiler = shutil.which("gcc")
    if compiler is None:
        raise SystemExit("gcc is missing; install it")
    needed: set[str] = {"libcuda.so.1"}
    symbols: dict[str, set[str]] = defaultdict(set)
    unversioned = set(DRIVER)
    for library in (capi / f"libonnxruntime_providers_{name}.so" for name in ("cuda", "tensorrt")):
        dynamic = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
        needed |= set(re.findall(r"NEEDED.*\[(lib(?:cu|nv)[^]]*)\]", dynamic))
        names = subprocess.run(["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True)
        for line in names.stdout.splitlines():
            name, _, version = line.split()[-1].partition("@")
            version = version.strip("@")
            if version.startswith("lib"):
                symbols[version].add(name)
            elif not version and re.match(r"cu[A-Z]|curand|nvrtc|get|create|init", name):
                unversioned.add(name)
    for soname in sorted(needed):
        own = symbols.get(soname, unversioned)  # the loader finds unversioned symbols in any library
        source = folder / f"{soname}.c"
        source.write_text("\n".join(BODIES.get(s, f"void *{s}() {{ return 0; }}") for s in sorted(own)) + "\n")
        script = folder / f"{soname}.map"
        script.write_text(f"{soname} {{ global: *; }};\n")
        versioned = [f"-Wl,--version-script={script}"] if soname in symbols else []
        flags = ["-w", "-fPIC", "-shared", "-o", str(folder / soname), str(source), f"-Wl,-soname,{soname}"]
        subprocess.run([compiler, *flags, *versioned], check=True)


def run(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run this Python; on failure, exit with its error message."""
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"python {' '.join(arguments)[:200]} failed with {done.returncode}: {done.stderr[-2000:]}")
    return done


if __name__ == "__main__":
    main()
