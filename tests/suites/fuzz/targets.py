"""Fuzz targets: each accepts any bytes and raises only on a bug.

Refusals (`AmpRewriteError` except `ConversionError`, which reports a bug) pass, and so does success.
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
    """Convert and save a model file, with the options of `WAYS` at `way` or at its last byte; print its inventory."""
    with _written(content, "m.onnx") as path:
        convert(path, **_way(content, way)).save(path.with_name("out.onnx"))  # type: ignore[arg-type]
    with _written(content, "m.onnx") as path:
        report_of(View.of(Model.load(path)), name="m", tool="").text(verbose=True)


def _way(content: bytes, way: int | None) -> dict[str, str]:
    return WAYS[way if way is not None else content[-1] % len(WAYS) if content else 0]


def emulated(content: bytes, way: int | None = None) -> None:
    """Emulate and save a model file, before and after a conversion (see `model`)."""
    with _written(content, "m.onnx") as path:
        emulate(path).save(path.with_name("twin.onnx"))
        converted = convert(path, **_way(content, way))  # type: ignore[arg-type]
        emulate(converted.result).save(path.with_name("out.onnx"))
        emulate(converted.result, rounding=False, io="same").save(path.with_name("wide.onnx"))


def stepped(content: bytes) -> None:
    """Build a training step from a model file."""
    with _written(content, "m.onnx") as path:
        policy = ("mixed_float16", "float32")[content[-1] % 2] if content else "float32"
        step = training_step(path, loss="mean_squared_error(y, targets)", optimizer="adamw,lr=0.1", policy=policy)
        save_step(step, path.with_name("s.onnx"))


def batches(content: bytes) -> None:
    """Compare a small model with its conversion on a file of arrays."""
    with _written(content, "batches.npz") as path:
        verify(onnx.parser.parse_model(_TEXT), _sound().result, path, rtol=0.1, atol=0.1)


def lists(content: bytes) -> None:
    """Load an op list in YAML."""
    with _written(content, "mine.yaml") as path:
        load_lists(DType.FLOAT16, [path])


def config(content: bytes) -> None:
    """Load settings in TOML."""
    with _written(content, "amp.toml") as path:
        from_file(path)


def report(content: bytes) -> None:
    """Read a report in JSON, explain it, print it in every form, and compare it with a valid one."""
    with _refusals():
        read = Report.from_json(content, "r.json")
        read.text(verbose=True)
        if read.rows:
            str(explained(read, ["#0"]))
        for delta in (diff(read, _sound().report), diff(_sound().report, read)):
            for form in ("text", "json", "markdown", "github"):
                delta.to(form, ())


def pattern(content: bytes) -> None:
    """Match a pattern for keep or lower against a small model."""
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
    """Accept a refusal."""
    try:
        yield
    except ConversionError:
        raise
    except AmpRewriteError:
        pass


@contextmanager
def _written(content: bytes, name: str) -> Iterator[Path]:
    """Yield the path of a file of this content in a temporary folder; accept a refusal."""
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
    """Convert the small model."""
    return convert(onnx.parser.parse_model(_TEXT))
