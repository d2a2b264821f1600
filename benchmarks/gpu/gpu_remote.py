"""The steps of a measurement on a machine without a network: unpack, check, draw the weights, measure, test.

    python benchmarks/run.py gpu_remote STEP … [--out DIR] [--minutes M] [--seconds-of-tests S] [--] [WORD …]

setup   unpack .gpu into DEST, choose CUDA libraries, write preflight.txt; every other step does this first
smoke   a product and a convolution in half on the GPU, with the numbers checked
grow    draw the weights of the skeletons, into memory
gpu     the benchmark `gpu`, with the words behind `--`; its rows are in DEST, and copied to DIR
tests   the tests that need a GPU

Needs nothing but Python until `setup` is done. A step that fails does not stop the next ones; the exit code is the
number of those that failed. A later call need not carry the folder again as long as DEST is there.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
RUN = str(ROOT / "benchmarks" / "run.py")
STEPS = ("setup", "smoke", "grow", "gpu", "tests")
LEAST = {"click": (8, 2), "networkx": (3, 3), "rich": (13, 7), "flatbuffers": (1,), "nvidia-ml-py": (12,)}
"""Packages that the pack brings, with the versions from which on those of the machine do."""
LIBRARIES = ("nvidia/cu13/lib", "nvidia/cudnn/lib", "torch/lib")
"""Folders with CUDA libraries below site-packages, where PyTorch's wheels put them."""
PREFLIGHT = (
    ("nvidia-smi",),
    ("nvidia-smi", "-q", "-d", "CLOCK,POWER,PERFORMANCE"),
    ("nproc",),
    ("free", "-g"),
    ("df", "-h", "/", "/dev/shm"),
)
PACKED = "AMP_REWRITE_GPU_PACKED"
MEMORY = Path("/dev/shm")
ROOM = 40 << 30
"""Bytes that the grown models take at most, with room to spare."""
TESTS = "tests/suites/gpu"
GRACE = 10


@dataclass(frozen=True, slots=True)
class Remote:
    """Places on the machine: the pack, what is unpacked of it, the grown models, and what comes back.

    `compiled`: the provider for which PyTorch compiles the models, if it is to.
    """

    pack: Path
    dest: Path
    models: Path
    out: Path
    extra: str = ""
    compiled: str = ""

    def setup(self) -> bool:
        """Unpack, unless that was done; return whether everything arrived whole."""
        done, carried = self.dest / "pack.json", self.pack / "pack.json"
        if done.exists() and (not carried.exists() or carried.read_bytes() == done.read_bytes()):
            return True
        self.dest.mkdir(parents=True, exist_ok=True)
        about = json.loads((self.pack / "pack.json").read_text("utf-8"))
        broken = [name for name, digest in about["sha256"].items() if self._digest(name) != digest]
        for name in broken:
            self.say(f"{name} did not arrive as it was packed")
        for name in ("site", "wheels", "skeletons"):  # of an older pack
            shutil.rmtree(self.dest / name, ignore_errors=True)
        (self.dest / "skeletons").mkdir()
        carried_too = (ROOT / "benchmarks" / "gpu" / "skeletons" / Path(name).name for name in about["sha256"])
        for path in filter(Path.exists, carried_too):  # the checkout has what other tools made of the models
            unpack(path, self.dest / "skeletons")
        for name in about["sha256"]:
            if name not in broken:
                place = self.dest / "skeletons" if name.startswith("skeletons/") else self.dest
                unpack(self.pack / name, place)
        (self.dest / "site").mkdir(exist_ok=True)
        self._link_libraries()
        self._fill_in()
        shutil.copy(self.pack / "pack.json", done)
        self.preflight()
        return not broken

    def _digest(self, name: str) -> str:
        path = self.pack / name
        return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else ""

    def _link_libraries(self) -> None:
        """Let onnxruntime, which looks beside itself, find the CUDA libraries of PyTorch."""
        link = self.dest / "site" / "nvidia"
        found = site_of("torch")
        if found is not None and (found / "nvidia").is_dir() and not link.exists():
            link.symlink_to(found / "nvidia")

    def _fill_in(self) -> None:
        """Take a packed package where that of the machine is missing or too old."""
        for name, least in LEAST.items():
            try:
                there = tuple(int(n) for n in re.findall(r"\d+", importlib.metadata.version(name))[: len(least)])
            except importlib.metadata.PackageNotFoundError:
                there = ()
            if there >= least:
                continue
            wheel = self.dest / "wheels" / name.replace("-", "_")
            had = ".".join(map(str, there)) or "missing"
            self.say(f"{name}: {had}; {'taken from the pack' if wheel.is_dir() else 'not in the pack either'}")
            if wheel.is_dir():
                shutil.copytree(wheel, self.dest / "site", dirs_exist_ok=True)

    def environment(self) -> dict[str, str]:
        """Return the environment of every step: the unpacked packages first, and the CUDA libraries."""
        found = site_of("torch")
        folders = [Path(part) for part in self.extra.split(os.pathsep) if part]
        folders += [found / part for part in LIBRARIES] if found is not None else []
        folders += [Path("/usr/local/cuda/lib64")]
        old = os.environ.get("LD_LIBRARY_PATH", "")
        path = [str(folder) for folder in folders if folder.is_dir()] + ([old] if old else [])
        return os.environ | {
            "PYTHONPATH": os.pathsep.join([str(self.dest / "site"), str(ROOT)]),
            "LD_LIBRARY_PATH": os.pathsep.join(path),
            "PYTHONUNBUFFERED": "1",
            "CUDA_MODULE_LOADING": "LAZY",  # nothing may look for code that was left out
            PACKED: self._packed(),
        }

    def _packed(self) -> str:
        """Return a sentence about what was left out of onnxruntime."""
        about = json.loads((self.dest / "pack.json").read_text("utf-8")).get("runtime") or {}
        keep = ", ".join(f"sm_{sm}" for sm in about.get("keep", ()))
        less = ", without kernels for experts, few bits and paged caches" if about.get("unused") else ""
        return f"onnxruntime-gpu {about['version']} with the code for {keep} alone{less}" if keep else ""

    def preflight(self) -> None:
        """Write what the machine is to preflight.txt."""
        with (self.out / "preflight.txt").open("a", encoding="utf-8") as file:
            for command in PREFLIGHT:
                file.write(f"$ {' '.join(command)}\n")
                file.flush()
                if shutil.which(command[0]):
                    subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False)
            packages = sorted(f"{d.metadata['Name']} {d.version}" for d in importlib.metadata.distributions())
            file.write("\n".join(packages) + "\n")

    def smoke(self) -> bool:
        """Compute something small; where that fails, once more with all that onnxruntime logs."""
        if self.ran([RUN, "gpu_smoke"], 120) == 0:
            return True
        self.ran([RUN, "gpu_smoke"], 120, SMOKE_LOUD="1")
        return False

    def grow(self) -> bool:
        """Draw the weights, unless that was done."""
        done = self.models / ".done"
        if not done.exists():
            self.models.mkdir(parents=True, exist_ok=True)
            compiling = threading.Thread(target=self._compile)
            compiling.start()  # beside the drawing of weights, so that nothing compiles while anything is timed
            grown = self.ran([RUN, "gpu_grow", str(self.dest / "skeletons"), str(self.models)], 300) == 0
            compiling.join()
            if not grown:
                return False
            done.touch()
        return True

    def _compile(self) -> None:
        """Compile the models with PyTorch, if they are asked for."""
        names = [path.name.removesuffix(".recipes.json") for path in (self.dest / "skeletons").glob("*.recipes.json")]
        built = [name for name in names if not name.startswith("dense")]
        if self.compiled and built:
            self.ran([RUN, "gpu_beside", *built, "--provider", self.compiled], 240)

    def gpu(self, end: float, words: Sequence[str]) -> bool:
        """Measure until the monotonic clock says `end`; copy rows and tables to where they come back."""
        if not self.grow():
            return False
        rows, minutes = self.dest / "rows", max(end - time.monotonic(), 0) / 60
        fixed = ["--models", str(self.models), "--out", str(rows), "--minutes", str(minutes)]
        code = self.ran([RUN, "gpu", *fixed, *words], 60 * minutes + GRACE)
        for name in ("gpu.json", "gpu.md"):
            if (rows / name).exists():
                shutil.copy(rows / name, self.out)
        return code == 0

    def tests(self, seconds: float) -> bool:
        """Run the tests that need a GPU."""
        words = ["-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "-W", "default", TESTS]
        return self.ran(words, seconds) == 0

    def ran(self, words: Sequence[str], limit: float, **more: str) -> int:
        """Run Python with the unpacked packages; what it says goes to log.txt, too. Return its exit code."""
        command = [sys.executable, *words]
        with subprocess.Popen(
            command,
            env=self.environment() | more,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process:
            listener = threading.Thread(target=self._listen, args=(process,))
            listener.start()
            try:
                process.wait(limit)
            except subprocess.TimeoutExpired:
                self.say(f"stopped after {limit:.0f} s")
                process.terminate()
                try:
                    process.wait(GRACE)
                except subprocess.TimeoutExpired:
                    process.kill()
            listener.join(GRACE)  # what its children still hold open is not waited for
        return process.returncode

    def _listen(self, process: subprocess.Popen[str]) -> None:
        """Say every line of a process."""
        assert process.stdout is not None
        for line in process.stdout:
            self.say(line.rstrip("\n"))

    def say(self, line: str) -> None:
        """Print a line and append it to log.txt, with the time."""
        line = f"[{time.strftime('%H:%M:%S')}] {line}"
        print(line, flush=True)
        with (self.out / "log.txt").open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def unpack(archive: Path, folder: Path) -> None:
    """Write the files of an archive into a folder."""
    with tarfile.open(archive) as packed:
        packed.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))


def site_of(package: str) -> Path | None:
    """Return the folder that a package is installed in, without importing it."""
    spec = importlib.util.find_spec(package)
    return Path(spec.origin).parents[1] if spec is not None and spec.origin else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="+", choices=STEPS)
    parser.add_argument("--pack", type=Path, default=ROOT / ".gpu")
    parser.add_argument("--dest", type=Path, default=Path.home() / "amp-rewrite-gpu")
    parser.add_argument("--models", type=Path, help="for the grown models (default: a folder in memory)")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "build/gpu")))
    parser.add_argument("--minutes", type=float, default=8.0, help="for all steps together (default 8)")
    parser.add_argument("--seconds-of-tests", type=float, default=120.0)
    parser.add_argument("--libraries", default="", help="more folders with CUDA libraries, before all others")
    words = sys.argv[1:]
    at = words.index("--") if "--" in words else len(words)
    args, more = parser.parse_args(words[:at]), words[at + 1 :]
    end = time.monotonic() + 60 * args.minutes
    args.out.mkdir(parents=True, exist_ok=True)
    memory = MEMORY if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > ROOM else args.dest
    models = args.models or memory / "amp-rewrite-models"
    places = (p.resolve() for p in (args.pack, args.dest, models, args.out))
    provider = more[more.index("--provider") + 1] if "--provider" in more else "cuda"
    remote = Remote(*places, extra=args.libraries, compiled=provider if "--plan" in more else "")
    calls = {
        "smoke": remote.smoke,
        "grow": remote.grow,
        "gpu": lambda: remote.gpu(end - (args.seconds_of_tests if "tests" in args.steps else 0), more),
        "tests": lambda: remote.tests(args.seconds_of_tests),
    }
    whole = remote.setup()
    failed = [] if whole else ["setup"]
    for step in args.steps:
        start = time.perf_counter()
        if step != "setup" and not calls[step]():
            failed.append(step)
        remote.say(f"{step}: {'failed' if step in failed else 'done'} after {time.perf_counter() - start:.0f} s")
    sys.exit(len(failed))


if __name__ == "__main__":
    main()
