"""Ops kept in float32 by safety rules in trained audio models, and the error of lowering them.

    python benchmarks/trained/holds.py FOLDER

FOLDER contains unpacked packages, each in a folder of the same name. For each model and rule, `lower` overrides the
rule's ops. Errors are absolute, in emulated float16, the largest over all outputs and inputs. Inputs are speech and
tones, each also at a fiftieth of its loudness. The script prints the rows of docs/evidence/decisions.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from amp_rewrite import convert, emulate  # noqa: E402  from the checkout, not an installed one
from amp_rewrite.decide.reasons import RULES  # noqa: E402
from benchmarks.trained.tasks import RATE, SPOKEN, Array, frames, speech, tones  # noqa: E402

Run = Callable[[Mapping[str, npt.ArrayLike]], list[Array]]
SECONDS = 3


def sounds(samples: int, rate: int = RATE) -> Iterator[Array]:
    for sound in (speech(*SPOKEN[:2]), tones(rate)):
        for loudness in (1, 1 / 50):
            yield np.float32(np.resize(sound, samples) * loudness)


def whole(run: Run, name: str, samples: int, scale: float = 1, axis: int | None = None, **more: float) -> list[Array]:
    """Return the outputs for whole sounds."""
    rows = (np.float32(sound * scale)[None] for sound in sounds(samples))
    rows = (row if axis is None else np.expand_dims(row, axis) for row in rows)
    fixed = {key: np.array(value, np.float32) for key, value in more.items()}
    return [out for row in rows for out in run({name: row, **fixed})]


def windows(run: Run) -> list[Array]:
    """Return the scores of all windows of 512 samples at once, each after 64 samples of the previous one."""
    state = np.zeros((1, 1, 128), np.float32)
    padded = (np.pad(sound, (64, 0)) for sound in sounds(SECONDS * RATE))
    return [run({"input": frames(sound, 576, 512), "h": state, "c": state})[0] for sound in padded]


def stream(run: Run, size: int, step: int, states: Mapping[str, tuple[int, ...]]) -> list[Array]:
    """Return the scores of consecutive windows of a sound, feeding the states back."""
    found = []
    for sound in sounds(SECONDS * RATE):
        state = {name: np.zeros(shape, np.float32) for name, shape in states.items()}
        for start in range(0, len(sound) - size, step):
            window = sound[None, start : start + size]
            result, *after = run({"input": window, "sr": np.array(RATE), **state})
            state = dict(zip(state, after, strict=True))
            found.append(result)
    return found


LSTM = {"h": (2, 1, 64), "c": (2, 1, 64)}
VOICE = "silero-vad/silero_vad/data/silero_vad"
MODELS: Mapping[str, Callable[[Run], list[Array]]] = {
    "basic-pitch/basic_pitch/saved_models/icassp_2022/nmp": partial(
        whole, name="serving_default_input_2:0", samples=43844, axis=-1
    ),
    "swift-f0/swift_f0/model": partial(whole, name="audio", samples=2 * RATE, fmin=46.875, fmax=2093.75),
    "npm-vad-web/dist/silero_vad_legacy": partial(stream, size=512, step=512, states=LSTM),
    f"{VOICE}_16k_sequence": windows,
    f"{VOICE}_op18_ifless": partial(stream, size=576, step=512, states={"state": (2, 1, 128)}),
    "speechmos/speechmos/dnsmos_models/sig_bak_ovr": partial(whole, name="input_1", samples=144160),
    "speechmos/speechmos/pdnsmos_models/sig_bak_ovr": partial(whole, name="input_1", samples=144160),
    "openwakeword/openwakeword/resources/models/melspectrogram": partial(
        whole, name="input", samples=2 * RATE, scale=32768
    ),
}


def error(path: Path, feed: Callable[[Run], list[Array]], exact: list[Array], **options: object) -> tuple[float, list]:
    converted = convert(path, to="float16", opset="keep", fuse="none", **options)  # type: ignore[arg-type]
    found = feed(runner(emulate(converted.model).to_proto().SerializeToString()))
    with np.errstate(invalid="ignore"):
        errors = [np.abs(np.float64(a) - b).max() for a, b in zip(found, exact, strict=True)]
    return float(np.max(errors)), list(converted.report.rows)


def runner(model: str | bytes) -> Run:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return lambda feeds: session.run(None, dict(feeds))


def main() -> None:
    folder = Path(sys.argv[1])
    for name, feed in MODELS.items():
        path = folder / f"{name}.onnx"
        exact = feed(runner(str(path)))
        usual, rows = error(path, feed, exact)
        for rule in RULES:
            kept_rows = [row for row in rows if row.rule == rule.name and "float32" in dict(row.variables).values()]
            if kept_rows:
                lowered, _ = error(path, feed, exact, lower=[row.name for row in kept_rows])
                print(f"| {name} | {rule.name} | {len(kept_rows)} | {usual:.1e} | {lowered:.1e} |", flush=True)


if __name__ == "__main__":
    main()
