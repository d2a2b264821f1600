"""Fuzz one target: `python tests/suites/fuzz/run.py TARGET [--seconds N] [--seed N] [--found FOLDER]`.

Inputs are random changes of valid ones, for models mostly those of `mutate.py`. Failing inputs are written to
`--found`; add the smallest one of each kind to `corpus/TARGET`, where it remains as a test.
"""

import argparse
import faulthandler
import hashlib
import random
import resource
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

HERE = Path(__file__).parent
TESTS = HERE.parents[1]
sys.path[:0] = [str(TESTS.parent), str(TESTS)]


MEMORY = 4 << 30  # bytes of address space
MODELS = ("model", "emulated", "stepped")
TARGETS = (*MODELS, "batches", "lists", "config", "report", "pattern")


def seeds(target: str) -> list[bytes]:
    """Return the target's initial inputs: valid ones, and all earlier findings."""
    from suites.fuzz import mutate
    from support import corpus

    root = TESTS.parent
    found = [path.read_bytes() for path in sorted((HERE / "corpus" / target).glob("*"))]
    if target in MODELS:
        found += mutate.spelled_out()
        found += [corpus.text_model(name).SerializeToString() for name in corpus.TEXT_MODELS]
        small = (path for path in sorted((TESTS / "models").glob("*.onnx")) if path.stat().st_size < 10_000)
        found += [path.read_bytes() for path in small]
    elif target == "batches":
        found += [mutate.arrays(names) for names in (["x"], ["0/x", "1/x"], ["x", "y"])]
    elif target == "lists":
        found += [path.read_bytes()[:3000] for path in sorted((root / "lists").glob("*.yaml"))]
        found.append(b"base: empty\nallow: [MatMul, {op: Conv, when: {operands: '<=2'}, because: it pays}]\n")
    elif target == "config":
        found.append(b'to = "float16"\nkeep = ["op=Exp"]\noverwrite = true\n[tool.amp-rewrite]\nlevel = "default"\n')
    elif target == "report":
        found += [path.read_bytes() for path in sorted((TESTS / "golden").glob("report*.json"))]
    else:
        found += [b"op=MatMul,feeds=Softmax", rb"re:layers\.[01]", b"scope=layers/*", b"in:x=float16"]
    return found


def changed(target: str, content: bytes, rng: random.Random) -> bytes:
    from suites.fuzz import mutate

    if target in MODELS and rng.random() < 0.7:
        return mutate.mutated(content, rng)
    return mutate.damaged(content, rng)


def randomly(target: str, seconds: float, seed: int, folder: Path) -> int:
    """Run random inputs until the time is up and return the number of kinds of failures."""
    from suites.fuzz import targets

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    rng = random.Random(seed)
    pool = seeds(target)
    kinds: Counter[str] = Counter()
    runs, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        content = changed(target, rng.choice(pool), rng)
        (folder / "last").write_bytes(content)  # the input to blame if the process crashes
        runs += 1
        try:
            targets.TARGETS[target](content)
        except Exception as error:  # noqa: BLE001 any error is a finding
            at = traceback.extract_tb(error.__traceback__)[-1]
            kind = f"{type(error).__name__} at {Path(at.filename).name}:{at.lineno}"
            kinds[kind] += 1
            if kinds[kind] == 1:
                name = hashlib.sha256(content).hexdigest()[:12]
                (folder / name).write_bytes(content)
                print(f"{name}: {kind}: {str(error)[:200]!r}", flush=True)
    (folder / "last").unlink(missing_ok=True)
    print(f"{target}: {runs} runs, {sum(kinds.values())} failures of {len(kinds)} kinds {dict(kinds)}")
    return len(kinds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--found", type=Path, default=Path("build/fuzz"))
    arguments = parser.parse_args()
    folder = arguments.found / arguments.target
    folder.mkdir(parents=True, exist_ok=True)
    faulthandler.enable()
    return 1 if randomly(arguments.target, arguments.seconds, arguments.seed, folder) else 0


if __name__ == "__main__":
    sys.exit(main())
