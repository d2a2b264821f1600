"""Mutations of models at the level of protobuf's wire format, which know no schema, and a runner that judges them.

`python tests/suites/hostile/wire_mutations.py run FOLDER` runs shards of mutations of eleven exported models and writes
one JSON file per shard into the folder; a later call skips the shards that are there. `total FOLDER` adds them up. Each
mutation goes through convert and save, reload, diff, explain and verify in a child process, whose exit code is the
judgment: 0 for a model that is accepted, 2 for a refusal in one line, anything else for a failure.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import io
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

TESTS = Path(__file__).parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(TESTS.parent), str(TESTS)]

MODELS = (
    "loop_ts16",
    "loop_dynamo21",
    "if_ts13",
    "if_dynamo20",
    "cnn_ts13",
    "moe_dynamo21",
    "bert_dynamo23",
    "whisper_encoder_ts17",
    "vit_dynamo22",
    "llama_dynamo23",
    "lstm_ts13",
)
FEEDS: dict[str, tuple[str, ...]] = {
    "cnn_ts13": ("--shape", "image=2,3,32,32"),
    "bert_dynamo23": ("--shape", "input_ids=2,9", "--shape", "attention_mask=2,9"),
    "whisper_encoder_ts17": ("--shape", "input_features=1,8,32"),
    "vit_dynamo22": ("--shape", "pixel_values=1,3,32,32"),
    "llama_dynamo23": ("--shape", "input_ids=1,9", "--shape", "attention_mask=1,9"),
}
"""Sizes of free dimensions for verify."""
SHARD = 250
"""Mutations of a shard. Its number is its seed."""
SECONDS, PATIENCE = 20, 180
"""Seconds of a child: of computing, and of waiting, since other processes may take the processor."""
MEMORY = 2 << 30
"""Largest resident set of a child, bytes."""
ADDRESSES = 6 << 30
"""Address space of a child, bytes: above MEMORY, since onnxruntime reserves more than it touches."""

ACCEPTED, REFUSED = 0, 2
TRACEBACK, GREEDY, RUNTIME, SLOW = 3, 4, 5, 6
"""Exit codes of a child: a traceback, too much memory, a fault inside onnxruntime, out of time."""
NAMES = {ACCEPTED: "accepted", REFUSED: "refused", TRACEBACK: "traceback", GREEDY: "memory", SLOW: "hang"}


# -- mutation ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Field:
    """A field of a message: number, wire type, and its value; the fields of a message where the bytes parse as one."""

    number: int
    wire: int
    value: int | bytes
    inner: list[Field] | None = None


def parsed(content: bytes, depth: int = 0) -> list[Field] | None:
    """Return the fields of a message; None if the bytes are not one."""
    fields, at = [], 0
    while at < len(content):
        tag, at = _varint(content, at)
        number, wire = tag >> 3, tag & 7
        if number == 0 or at < 0:
            return None
        value: int | bytes
        if wire == 0:
            value, at = _varint(content, at)
            if at < 0:
                return None
            fields.append(Field(number, wire, value))
            continue
        length = {1: 8, 5: 4}.get(wire, -1)
        if wire == 2:
            length, at = _varint(content, at)
        if at < 0 or length < 0 or at + length > len(content):
            return None
        value = content[at : at + length]
        at += length
        inner = parsed(value, depth + 1) if wire == 2 and length > 1 and depth < 30 and not _text(value) else None
        fields.append(Field(number, wire, value, inner))
    return fields


def _text(value: bytes) -> bool:
    return len(value) < 200 and all(32 <= byte < 127 for byte in value)


def _varint(content: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    for index in range(at, min(at + 10, len(content))):
        value |= (content[index] & 0x7F) << shift
        if content[index] < 0x80:
            return value, index + 1
        shift += 7
    return 0, -1


def written(fields: Sequence[Field]) -> bytes:
    """Return the message of these fields."""
    out = bytearray()
    for each in fields:
        out += _number(each.number << 3 | each.wire)
        if each.wire == 0:
            assert isinstance(each.value, int)
            out += _number(each.value)
            continue
        body = each.value if each.inner is None else written(each.inner)
        assert isinstance(body, bytes)
        out += _number(len(body)) + body if each.wire == 2 else body
    return bytes(out)


def _number(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


_NUMBERS = (0, 1, 2, 3, 7, 10, 16, 255, 2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1, -1, -2, -(2**31), -(2**63))
_FLOATS = (b"\0\0\xc0\x7f", b"\0\0\x80\x7f", b"\0\0\x80\xff", b"\0\0\0\0", b"\1\0\0\0", b"\xff\xff\x7f\x7f")
_TEXTS = (b"", b"\xff\xfe", b"\0", b"\n::error::x", b"\x1b[2J", "é".encode() * 40, b"a" * 5000, b"..")
Holder = tuple[list[Field], int]


def mutated(content: bytes, rng: random.Random) -> bytes:
    """Return the message with one to three changes to its fields, then perhaps some bytes damaged."""
    fields = parsed(content)
    assert fields is not None
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        holders = list(_holders(fields))
        owner, at = rng.choice(holders)
        rng.choice(_CHANGES)(owner, at, holders, rng)
    out = bytearray(written(fields))
    if rng.random() < 0.05 and out:
        for _ in range(rng.randint(1, 3)):
            out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    return bytes(out)


def _holders(fields: list[Field]) -> Iterator[Holder]:
    for at, each in enumerate(fields):
        yield fields, at
        if each.inner is not None:
            yield from _holders(each.inner)


def _value(owner: list[Field], at: int, holders: list[Holder], rng: random.Random) -> None:
    """Give the field another value of its wire type."""
    old = owner[at]
    if old.wire == 0:
        assert isinstance(old.value, int)
        old.value = rng.choice(
            (*_NUMBERS, old.value + 1, old.value - 1, old.value * 2, old.value ^ 1 << rng.randrange(64))
        )
    elif old.wire == 2 and old.inner is None:
        assert isinstance(old.value, bytes)
        near = [f.value for fields, i in rng.choices(holders, k=40) if (f := fields[i]).wire == 2 and f.inner is None]
        cut = old.value[: rng.randrange(len(old.value) + 1)]
        doubled = old.value * 2 if len(old.value) < 100_000 else b""
        old.value = rng.choice((*_TEXTS[rng.randrange(len(_TEXTS)) :][:1], cut, doubled, *near))  # type: ignore[assignment]
    elif old.wire == 5:
        old.value = rng.choice(_FLOATS)
    elif old.wire == 1:
        old.value = rng.randbytes(8)
    else:
        _drop(owner, at, holders, rng)


def _text_of_another(owner: list[Field], at: int, holders: list[Holder], rng: random.Random) -> None:
    """Give the field the text of another field of the same number: names are exchanged."""
    old = owner[at]
    others = [
        f for fields, i in holders if (f := fields[i]).wire == old.wire and f.number == old.number and f is not old
    ]
    if others:
        other = rng.choice(others)
        old.value, old.inner = other.value, _copied(other.inner)


def _drop(owner: list[Field], at: int, holders: list[Holder], rng: random.Random) -> None:
    del owner[at]


def _double(owner: list[Field], at: int, holders: list[Holder], rng: random.Random) -> None:
    copies = rng.choice((1, 1, 1, 2, 200))
    if copies * _size(owner[at]) < 100_000:
        owner[at:at] = [_copy(owner[at]) for _ in range(copies)]


def _exchange(owner: list[Field], at: int, holders: list[Holder], rng: random.Random) -> None:
    other, there = rng.choice(holders)
    if any(f is other for f, _ in [(owner, at)]) or rng.random() < 0.5:
        there = rng.randrange(len(owner))
        owner[at], owner[there] = owner[there], owner[at]
    else:
        owner[at] = _copy(other[there])


def _insert(owner: list[Field], at: int, holders: list[Holder], rng: random.Random) -> None:
    other, there = rng.choice(holders)
    if _size(other[there]) < 300_000:
        owner.insert(at, _copy(other[there]))


def _renumber(owner: list[Field], at: int, holders: list[Holder], rng: random.Random) -> None:
    owner[at].number = rng.choice((owner[at].number + 1, max(1, owner[at].number - 1), rng.randint(1, 30)))


def _retype(owner: list[Field], at: int, holders: list[Holder], rng: random.Random) -> None:
    new = rng.choice((0, 1, 2, 5))
    owner[at] = Field(owner[at].number, new, {0: rng.choice(_NUMBERS), 1: bytes(8), 2: b"ab", 5: bytes(4)}[new])


def _wrap(owner: list[Field], at: int, holders: list[Holder], rng: random.Random) -> None:
    owner[at] = Field(owner[at].number, 2, b"", [_copy(owner[at])])


def _copy(old: Field) -> Field:
    return Field(old.number, old.wire, old.value, _copied(old.inner))


def _copied(inner: list[Field] | None) -> list[Field] | None:
    return None if inner is None else [_copy(each) for each in inner]


def _size(old: Field) -> int:
    return len(old.value) if isinstance(old.value, bytes) else 8


_CHANGES: tuple[Callable[[list[Field], int, list[Holder], random.Random], None], ...] = (
    _value,
    _value,
    _value,
    _text_of_another,
    _text_of_another,
    _drop,
    _double,
    _exchange,
    _insert,
    _renumber,
    _retype,
    _wrap,
)


# -- judgment ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Judgment:
    """How a mutation ended: the code, the command at which it did, the end of its words, its cost."""

    code: int
    stage: str
    words: str
    seconds: float
    peak: int

    @property
    def name(self) -> str:
        return NAMES.get(self.code, "onnxruntime" if self.code == RUNTIME else f"exit {self.code}")

    @property
    def failed(self) -> bool:
        return self.code not in (ACCEPTED, REFUSED, RUNTIME)


COMMANDS = (
    ("convert", "m.onnx", "-o", "out.onnx", "--report", "r.json", "-v"),
    ("report", "out.onnx", "-v"),
    ("diff", "m.onnx", "out.onnx"),
    ("explain", "r.json", "#0"),
    ("verify", "m.onnx", "out.onnx", "--random", "--set", "rtol=1"),
)
"""Of a mutation that convert refuses, `report m.onnx` alone runs."""
WAYS = ((), (), ("--target", "onnx", "--set", "level=lower-all"), ("--opset", "auto"), ("--fuse", "contrib"))


def prepared() -> None:
    """Import and read all that a child needs, so that a fork has it."""
    import onnx.parser
    import onnx.reference
    import onnxruntime  # noqa: F401

    import amp_rewrite.evidence.verify
    import amp_rewrite.reports.diff
    import amp_rewrite.reports.explain  # noqa: F401
    from amp_rewrite.pipeline.convert import convert

    warm = '<ir_version: 8, opset_import: ["" : 17]> g (float[2,2] x) => (float[2,2] y) { y = MatMul (x, x) }'
    convert(onnx.parser.parse_model(warm)).report.text()
    gc.freeze()  # a child that collects garbage would copy all pages


def judged(name: str, content: bytes, way: Sequence[str], folder: Path) -> Judgment:
    """Run the commands on a model in a child process; judge by its exit code. Call `prepared` once before."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "m.onnx").write_bytes(content)
    log, start = folder / "log", time.monotonic()
    child = os.fork()
    if not child:
        _child({"convert": way, "verify": FEEDS.get(name, ())}, folder, log)
    status, peak, computed = _waited(child, start + PATIENCE)
    seconds = time.monotonic() - start
    lines = log.read_text("utf-8", "backslashreplace").splitlines() if log.exists() else []
    stage = next((line.removeprefix("stage ") for line in reversed(lines) if line.startswith("stage ")), "")
    code = os.waitstatus_to_exitcode(status)
    if code == -signal.SIGXCPU or (code == -signal.SIGKILL and seconds >= PATIENCE):
        code = SLOW
    elif peak > MEMORY:
        code = GREEDY
    return Judgment(code, stage, "\n".join(lines[-30:])[-3000:], computed, peak)


def _child(more: Mapping[str, Sequence[str]], folder: Path, log: Path) -> None:
    from amp_rewrite.cli import program

    os.chdir(folder)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(0, 1)
    os.dup2(descriptor, 2)
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESSES, ADDRESSES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    faulthandler.enable()
    worst, commands = ACCEPTED, list(COMMANDS)
    while commands:
        words = list(commands.pop(0))
        os.write(descriptor, f"stage {words[0]}\n".encode())
        code, said = _run(program.main, [*words, *more.get(words[0], ())])
        os.write(descriptor, said[-4000:].encode("utf-8", "backslashreplace"))
        if "Traceback (most recent call last)" in said or "please report" in said:
            os._exit(TRACEBACK)
        if "out of memory" in said:
            os._exit(GREEDY)
        if code not in (0, 1, 2):
            os._exit(100 + abs(code) % 100)
        if code == REFUSED:
            worst = REFUSED
            if words[0] == "convert":
                commands = [("report", "m.onnx", "-v")]
    os._exit(worst)


def _run(main: Callable[[list[str]], object], words: list[str]) -> tuple[int, str]:
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            main(words)
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else 99, said.getvalue()
    return 99, said.getvalue()


def _waited(child: int, deadline: float) -> tuple[int, int, float]:
    """Return the wait status, the peak and the seconds of computing of a child, which is killed at the deadline."""
    pause = 0.002
    while True:
        done, status, usage = os.wait4(child, os.WNOHANG)
        if done:
            return status, usage.ru_maxrss * 1024, usage.ru_utime + usage.ru_stime
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
        time.sleep(pause)
        pause = min(pause * 1.3, 0.05)


# -- shards --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Shard:
    """One shard: mutation number i of shard s has the seed "s:i"."""

    number: int
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[dict[str, object]] = field(default_factory=list)
    runtime: list[dict[str, object]] = field(default_factory=list)
    slowest: float = 0.0
    largest: int = 0


def case(shard: int, number: int) -> tuple[str, bytes, Sequence[str]]:
    """Return the model's name, the mutated bytes and the options of convert."""
    rng = random.Random(f"{shard}:{number}")
    name = MODELS[(shard * SHARD + number) % len(MODELS)]
    return name, mutated((TESTS / "models" / f"{name}.onnx").read_bytes(), rng), rng.choice(WAYS)


def judged_apart(seeds: Sequence[tuple[int, int]], folder: Path) -> list[Judgment]:
    """Judge mutations by shard and number, in a process of its own: a fork of a large one has little memory left."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_judge, seeds, folder).result()


def _judge(seeds: Sequence[tuple[int, int]], folder: Path) -> list[Judgment]:
    prepared()
    return [judged(*case(*seed), folder) for seed in seeds]


def run_shard(number: int, size: int = SHARD) -> Shard:
    """Run the mutations of a shard."""
    shard = Shard(number)
    with tempfile.TemporaryDirectory(prefix="amp-wire.") as place:
        for index in range(size):
            name, content, way = case(number, index)
            outcome = judged(name, content, way, Path(place, "case"))
            if outcome.stage == "verify" and outcome.code < 0:
                outcome.code = _by_runtime(outcome, content, Path(place, "case"))
            shard.counts[outcome.name] += 1
            shard.slowest = max(shard.slowest, round(outcome.seconds, 2))
            shard.largest = max(shard.largest, outcome.peak)
            entry = {"case": f"{number}:{index}", "model": name, "way": list(way), "name": outcome.name}
            entry |= {"stage": outcome.stage, "words": outcome.words[-1500:]}
            if outcome.failed:
                shard.failures.append(entry)
            elif outcome.code == RUNTIME:
                shard.runtime.append({**entry, "words": outcome.words[-200:]})
    return shard


def _by_runtime(outcome: Judgment, content: bytes, folder: Path) -> int:
    """Return RUNTIME if onnxruntime alone dies of the model or of the converted one; else the code."""
    return RUNTIME if "onnxruntime" in outcome.words else outcome.code


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("run", "total", "show"))
    parser.add_argument("folder", type=Path, help="of the shards; for show: a case, as in 3:17, to write to case.onnx")
    parser.add_argument("--shards", type=int, default=120)
    parser.add_argument("--first", type=int, default=0)
    given = parser.parse_args()
    if given.what == "show":
        shard, number = map(int, str(given.folder).split(":"))
        name, content, way = case(shard, number)
        Path("case.onnx").write_bytes(content)
        print(name, *way)
        return 0
    if given.what == "run":
        given.folder.mkdir(parents=True, exist_ok=True)
        prepared()
        for number in range(given.first, given.first + given.shards):
            file = given.folder / f"{number:04}.json"
            if not file.exists():
                shard = run_shard(number)
                scratch = file.with_suffix(".part")
                scratch.write_text(json.dumps({**_json(shard)}, indent=1) + "\n", encoding="utf-8")
                scratch.replace(file)
                print(number, dict(shard.counts), flush=True)
    total = totals(given.folder)
    print(json.dumps(total, indent=1))
    return 1 if total["failures"] else 0


def _json(shard: Shard) -> dict[str, object]:
    return {name: getattr(shard, name) for name in Shard.__slots__}


def totals(folder: Path) -> dict[str, object]:
    """Add up the shards in a folder."""
    counts: Counter[str] = Counter()
    shards = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.json"))]
    for shard in shards:
        counts.update(shard["counts"])
    return {
        "mutations": counts.total(),
        "models": len(MODELS),
        "shards": len(shards),
        "outcomes": dict(sorted(counts.items())),
        "failures": sum(len(shard["failures"]) for shard in shards),
        "slowest_seconds": max((shard["slowest"] for shard in shards), default=0),
        "largest_bytes": max((shard["largest"] for shard in shards), default=0),
    }


if __name__ == "__main__":
    sys.exit(main())
