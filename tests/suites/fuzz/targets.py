"""What is fuzzed: each target takes any bytes, and raises only what must never leave the package.

Refusals (`AmpRewriteError` but for `ConversionError`, which says of itself that it is a bug) are fine; so is success.
"""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import onnx

from amp_rewrite.cli.parameters import from_file
from amp_rewrite.dtypes import DType
from amp_rewrite.errors import AmpRewriteError, ConversionError
from amp_rewrite.evidence.verify import verify
from amp_rewrite.files.model import Model
from amp_rewrite.ir.view import View
from amp_rewrite.pipeline.conversion import Converted
from amp_rewrite.pipeline.convert import convert
from amp_rewrite.reports.diff import diff
from amp_rewrite.reports.explain import explained
from amp_rewrite.reports.report import Report
from amp_rewrite.reports.report_builder import report_of
from amp_rewrite.rewrite.emulate import emulate
from amp_rewrite.settings.op_lists import load_lists
from amp_rewrite.settings.selectors import select
from amp_rewrite.train import save_step, training_step

WAYS: tuple[dict[str, str], ...] = (
    {},
    {"target": "onnx", "level": "lower-all"},
    {"target": "onnx", "level": "unsafe-force-all", "safety": "none", "io": "low"},
    {"target": "tensorrt", "to": "bfloat16"},
    {"opset": "auto"},
    {"fuse": "contrib"},
    {"fuse": "contrib", "opset": "auto", "to": "bfloat16"},
    {"level": "treat-gray-as-deny"},
    {"safety": "none", "fuse": "none", "opset": "23"},
)


def model(content: bytes, way: int | None = None) -> None:
    """A model file, converted (in that of `WAYS`, else the one that its last byte chooses) and saved; its inventory,
    printed."""
    with _written(content, "m.onnx") as path:
        convert(path, **_way(content, way)).save(path.with_name("out.onnx"))  # type: ignore[arg-type]
    with _written(content, "m.onnx") as path:
        report_of(View.of(Model.load(path)), name="m", tool="").text(verbose=True)


def _way(content: bytes, way: int | None) -> dict[str, str]:
    return WAYS[way if way is not None else content[-1] % len(WAYS) if content else 0]


def emulated(content: bytes, way: int | None = None) -> None:
    """A model file, emulated as it is and after a conversion (see `model`), and saved."""
    with _written(content, "m.onnx") as path:
        emulate(path).save(path.with_name("twin.onnx"))
        converted = convert(path, **_way(content, way))  # type: ignore[arg-type]
        emulate(converted.result).save(path.with_name("out.onnx"))
        emulate(converted.result, rounding=False, io="same").save(path.with_name("wide.onnx"))


def stepped(content: bytes) -> None:
    """A model file, made into a training step."""
    with _written(content, "m.onnx") as path:
        policy = ("mixed_float16", "float32")[content[-1] % 2] if content else "float32"
        step = training_step(path, loss="mean_squared_error(y, targets)", optimizer="adamw,lr=0.1", policy=policy)
        save_step(step, path.with_name("s.onnx"))


def batches(content: bytes) -> None:
    """A file of arrays, calibrated with and compared on by a small model."""
    with _written(content, "batches.npz") as path:
        verify(onnx.parser.parse_model(_TEXT), _sound().result, path, rtol=0.1, atol=0.1)


def lists(content: bytes) -> None:
    """An op list in YAML."""
    with _written(content, "mine.yaml") as path:
        load_lists(DType.FLOAT16, [path])


def config(content: bytes) -> None:
    """Settings in TOML."""
    with _written(content, "amp.toml") as path:
        from_file(path)


def report(content: bytes) -> None:
    """A report in JSON, read, explained, printed in every form, and compared with a sound one."""
    with _refusals():
        read = Report.from_json(content, "r.json")
        read.text(verbose=True)
        if read.rows:
            str(explained(read, ["#0"]))
        for delta in (diff(read, _sound().report), diff(_sound().report, read)):
            for form in ("text", "json", "markdown", "github"):
                delta.to(form, ())


def pattern(content: bytes) -> None:
    """A pattern for keep or lower, against a small model."""
    with _refusals():
        select(_sound().view, content.decode("utf-8", "surrogateescape"))


TARGETS: dict[str, Callable[..., None]] = {
    "model": model,
    "emulated": emulated,
    "stepped": stepped,
    "batches": batches,
    "lists": lists,
    "config": config,
    "report": report,
    "pattern": pattern,
}


@contextmanager
def _refusals() -> Iterator[None]:
    """Let a refusal be the end of a run."""
    try:
        yield
    except ConversionError:
        raise
    except AmpRewriteError:
        pass


@contextmanager
def _written(content: bytes, name: str) -> Iterator[Path]:
    """The path of a file of this content, in a folder of its own; a refusal may be the end of the body."""
    with tempfile.TemporaryDirectory(prefix="amp-fuzz.") as folder, _refusals():
        path = Path(folder, name)
        path.write_bytes(content)
        yield path


_TEXT = """
<ir_version: 10, opset_import: ["" : 21]>
net (float[2,4] x) => (float[2,3] y)
<float[4,3] w = {1,2,3,4,5,6,7,8,9,10,11,12}> {
  [first] h = MatMul (x, w)
  [act] a = Relu (h)
  [squash] y = Softmax (a)
}
"""


@cache
def _sound() -> Converted:
    """The small model, converted."""
    return convert(onnx.parser.parse_model(_TEXT))
