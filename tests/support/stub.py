"""Build the CUDA stub once, and query where onnxruntime would place a model's nodes.

The libraries are in `.cuda_stub/KEY/` at the root of the repository; KEY changes with the sources and with
onnxruntime, so that a stale build is never used. `cuda_stub/build.sh` describes the limits of the stub.
"""

import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from support.paths import ROOT

SOURCES = Path(__file__).parent / "cuda_stub"
CACHE = ROOT / ".cuda_stub"
TOOLS = ("sh", "gcc", "g++", "nm", "strings", "awk")


@functools.cache
def folder() -> tuple[Path | None, str]:
    """Return the folder of the stub libraries, or None with the reason."""
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return None, f"building the CUDA stub needs {', '.join(missing)}"
    provider = cuda_provider()
    if provider is None:
        return None, "onnxruntime-gpu is not installed: no CUDA provider to stub for"
    include = next((path for path in include_folders() if has_cuda_13(path)), None)
    if include is None:
        return None, "no CUDA 13 headers: pip install 'nvidia-cuda-runtime==13.*' 'nvidia-cuda-crt==13.*'"
    target = CACHE / key(provider)
    if not target.exists():
        failure = build(include, target)
        if failure:
            return None, f"the CUDA stub did not build: {failure}"
    return target, ""


def placements(models: Sequence[Path], *, level: str = "all") -> list[dict[str, Any]]:
    """Return the rows of `cuda_stub/placement.py`; a crash of the runtime is that model's "error"."""
    libraries, reason = folder()
    if libraries is None:
        raise RuntimeError(reason)
    rows: list[dict[str, Any]] = []
    while len(rows) < len(models):
        rest = [str(model) for model in models[len(rows) :]]
        command = [sys.executable, str(SOURCES / "placement.py"), "--level", level, *rest]
        done = subprocess.run(command, env=environment(libraries), capture_output=True, text=True, timeout=300)
        answered = [json.loads(line) for line in done.stdout.splitlines()]
        rows += answered
        if len(answered) < len(rest):
            rows.append({"error": f"exit {done.returncode}: {done.stderr[-600:]}"})
    return rows


def environment(libraries: Path) -> dict[str, str]:
    """Return the environment of a process that finds the stub libraries and the tests."""
    path = os.pathsep.join(filter(None, (str(libraries), os.environ.get("LD_LIBRARY_PATH"))))
    return {**os.environ, "LD_LIBRARY_PATH": path, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests")))}


def on_cuda(libraries: Path, program: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a Python program with the stub's CUDA provider."""
    command = [sys.executable, "-c", program, *words]
    return subprocess.run(command, env=environment(libraries), capture_output=True, text=True, timeout=300)


def cuda_provider() -> Path | None:
    """Return the CUDA provider's library in the installed onnxruntime; None in a build without CUDA."""
    spec = importlib.util.find_spec("onnxruntime")
    if spec is None or spec.origin is None:
        return None
    library = Path(spec.origin).parent / "capi" / "libonnxruntime_providers_cuda.so"
    return library if library.exists() else None


def include_folders() -> Iterator[Path]:
    """Yield candidate folders of CUDA headers: $CUDA_INCLUDE, the system, then pip's nvidia packages."""
    if chosen := os.environ.get("CUDA_INCLUDE"):
        yield Path(chosen)
    yield from sorted(Path("/usr/local").glob("cuda*/include"), reverse=True)
    yield Path("/usr/include")
    yield from (Path(entry) / "nvidia" / "cu13" / "include" for entry in sys.path if entry)


def has_cuda_13(include: Path) -> bool:
    header = include / "cuda_runtime_api.h"
    if not header.exists() or not (include / "crt" / "host_defines.h").exists():
        return False
    text = header.read_text(encoding="utf-8", errors="replace")
    return re.search(r"#define\s+CUDART_VERSION\s+13\d{3}\b", text) is not None


def key(provider: Path) -> str:
    """Return the key of a build: sources, the runtime's version and the provider's size."""
    digest = hashlib.sha256()
    for source in [*sorted(SOURCES.glob("*.c*")), SOURCES / "build.sh"]:
        digest.update(source.read_bytes())
    version = importlib.metadata.version("onnxruntime-gpu")
    digest.update(f"{version} {provider.stat().st_size}".encode())
    return f"{version}-{digest.hexdigest()[:12]}"


def build(include: Path, target: Path) -> str:
    """Build into `target` and return "" or the end of the compiler's output. Concurrent builds are safe."""
    CACHE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        fresh = Path(scratch) / "built"
        command = ["sh", str(SOURCES / "build.sh"), sys.executable, str(include), str(fresh)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if done.returncode:
            return done.stderr[-400:]
        try:
            fresh.rename(target)
        except OSError:
            if not target.exists():  # otherwise another process was faster, with the same result
                raise
    return ""
