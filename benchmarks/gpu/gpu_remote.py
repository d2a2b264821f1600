"""Measure on a machine without a network, in steps: unpack, check, draw the weights, measure, test.

    python benchmarks/run.py gpu_remote STEP … [--out DIR] [--minutes M] [--seconds-of-tests S] [--] [WORD …]

setup   unpack .gpu into DEST, choose CUDA libraries, write preflight.txt; every other step does this first
smoke   check a product and a convolution in half precision on the GPU
grow    draw the weights of the skeletons, into memory
gpu     run the benchmark `gpu` with the arguments after `--`; its rows are in DEST, and copied to DIR
tests   run the tests that need a GPU

It needs only Python until `setup` is done. After a failed step, the next ones still run; the exit code is the number of
failed steps. Later calls do not need the folder again while DEST exists.
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
"""Packages in the pack, with the lowest sufficient versions on the machine."""
LIBRARIES = ("nvidia/cu13/lib", "nvidia/cudnn/lib", "torch/lib")
"""Folders of PyTorch's CUDA libraries below site-packages."""
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
"""The most bytes the grown models take, with a margin."""
TESTS = "tests/suites/gpu"
GRACE = 10


@dataclass(frozen=True, slots=True)
class Remote:
    """The folders on the machine: the pack, its unpacked contents, the grown models, and the results.

    `compiled`: the provider for PyTorch's compiled models, if any.
    """

    pack: Path
    dest: Path
    models: Path
    out: Path
    extra: str = ""
    compiled: str = ""

    def setup(self) -> bool:
        """Unpack, unless it is done; return True if all files arrived intact."""
        done, carried = self.dest / "pack.json", self.pack / "pack.json"
        if done.exists() and (not carried.exists() or carried.read_bytes() == done.read_bytes()):
            return True
        self.dest.mkdir(parents=True, exist_ok=True)
        about = json.loads((self.pack / "pack.json").read_text("utf-8"))
        broken = [name for name, digest in about["sha256"].items() if self._digest(name) != digest]
        for name in broken:
            self.say(f"{name} is corrupted or missing")
        for name in ("site", "wheels", "skeletons"):  # of an older pack
            shutil.rmtree(self.dest / name, ignore_errors=True)
        (self.dest / "skeletons").mkdir()
        carried_too = (ROOT / "benchmarks" / "gpu" / "skeletons" / Path(name).name for name in about["sha256"])
        for path in filter(Path.exists, carried_too):  # the checkout has other tools' conversions
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
        """Link PyTorch's CUDA libraries next to onnxruntime, for it to find them."""
        link = self.dest / "site" / "nvidia"
        found = site_of("torch")
        if found is not None and (found / "nvidia").is_dir() and not link.exists():
            link.symlink_to(found / "nvidia")

    def _fill_in(self) -> None:
        """Use a packed package if the machine's is missing or too old."""
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
        """Return the environment of the steps, with the unpacked packages and the CUDA libraries."""
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
            "CUDA_MODULE_LOADING": "LAZY",  # never load code that was left out
            PACKED: self._packed(),
        }

    def _packed(self) -> str:
        """Return a sentence about the parts left out of onnxruntime."""
        about = json.loads((self.dest / "pack.json").read_text("utf-8")).get("runtime") or {}
        keep = ", ".join(f"sm_{sm}" for sm in about.get("keep", ()))
        less = ", without kernels for experts, few bits and paged caches" if about.get("unused") else ""
        return f"onnxruntime-gpu {about['version']} with only the code for {keep}{less}" if keep else ""

    def preflight(self) -> None:
        """Write facts about the machine to preflight.txt."""
        with (self.out / "preflight.txt").open("a", encoding="utf-8") as file:
            for command in PREFLIGHT:
                file.write(f"$ {' '.join(command)}\n")
                file.flush()
                if shutil.which(command[0]):
                    subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False)
            packages = sorted(f"{d.metadata['Name']} {d.version}" for d in importlib.metadata.distributions())
            file.write("\n".join(packages) + "\n")

    def smoke(self) -> bool:
        """Run a small check; after a failure, again with onnxruntime's full log."""
        if self.ran([RUN, "gpu_smoke"], 120) == 0:
            return True
        self.ran([RUN, "gpu_smoke"], 120, SMOKE_LOUD="1")
        return False

    def grow(self) -> bool:
        """Draw the weights, unless it is done."""
        done = self.models / ".done"
        if not done.exists():
            self.models.mkdir(parents=True, exist_ok=True)
            compiling = threading.Thread(target=self._compile)
            compiling.start()  # while the weights are drawn, since nothing may compile during timing
            grown = self.ran([RUN, "gpu_grow", str(self.dest / "skeletons"), str(self.models)], 300) == 0
            compiling.join()
            if not grown:
                return False
            done.touch()
        return True

    def _compile(self) -> None:
        """Compile the models with PyTorch, if requested."""
        names = [path.name.removesuffix(".recipes.json") for path in (self.dest / "skeletons").glob("*.recipes.json")]
        built = [name for name in names if not name.startswith("dense")]
        if self.compiled and built:
            self.ran([RUN, "gpu_beside", *built, "--provider", self.compiled], 240)

    def gpu(self, end: float, words: Sequence[str]) -> bool:
        """Measure until the monotonic time `end`; copy rows and tables to the results."""
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
        """Run the tests marked gpu."""
        words = ["-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "-W", "default", TESTS]
        return self.ran(words, seconds) == 0

    def ran(self, words: Sequence[str], limit: float, **more: str) -> int:
        """Run Python with the unpacked packages, log its output, and return its exit code."""
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
            listener.join(GRACE)  # do not wait for children that keep the pipe open
        return process.returncode

    def _listen(self, process: subprocess.Popen[str]) -> None:
        """Print and log every line of a process."""
        assert process.stdout is not None
        for line in process.stdout:
            self.say(line.rstrip("\n"))

    def say(self, line: str) -> None:
        """Print a line with the time, and append it to log.txt."""
        line = f"[{time.strftime('%H:%M:%S')}] {line}"
        print(line, flush=True)
        with (self.out / "log.txt").open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def unpack(archive: Path, folder: Path) -> None:
    """Write the files of an archive into a folder."""
    with tarfile.open(archive) as packed:
        packed.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))


def site_of(package: str) -> Path | None:
    """Return the folder of an installed package, without importing it."""
    spec = importlib.util.find_spec(package)
    return Path(spec.origin).parents[1] if spec is not None and spec.origin else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="+", choices=STEPS)
    parser.add_argument("--pack", type=Path, default=ROOT / ".gpu")
    parser.add_argument("--dest", type=Path, default=Path.home() / "amp-rewrite-gpu")
    parser.add_argument("--models", type=Path, help="folder for the grown models (default: in memory)")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "build/gpu")))
    parser.add_argument("--minutes", type=float, default=8.0, help="time limit for all steps together (default: 8)")
    parser.add_argument("--seconds-of-tests", type=float, default=120.0)
    parser.add_argument("--libraries", default="", help="additional folders with CUDA libraries, searched first")
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
