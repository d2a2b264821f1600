"""One tool on one shipped model, before or after the conversion: convert, open, run, compare, count."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
import onnxruntime

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import AmpRewriteError
from amp_rewrite.files.model import Model
from amp_rewrite.ir.view import View
from amp_rewrite.pipeline.convert import convert
from amp_rewrite.reports.report_builder import report_of
from amp_rewrite.rewrite.emulate import emulate
from amp_rewrite.runtime.runner import Runner
from suites.clients.tools import TOOLS, Tool
from support.corpus import EXPORTED
from support.paths import ROOT
from support.quantized_models import Feeds, batches, integer_kernels, run_and_count
from support.tolerance import rounding_bound

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]
MODELS = {Path(name).stem: ROOT / name for name in EXPORTED}
"""The shipped models."""
ORDERS = ("before", "after")
"""The tool before the conversion, or after it."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a tool, a model and an order.

    `verdict`: "usable"; "tool": the tool does not take the model, or onnxruntime not what the tool makes of a float32
    model; "convert", "open", "emulate", "wrong": what failed then; "crash", "hang". `error`: the largest difference of
    an output from the reference in units of its bound. `low`: the share of compute ops in float16; `casts` between
    floats; `kernels`: those that compute on integers after onnxruntime's optimization. `…_alone`: the same without the
    conversion (kernels) or without the tool (others).
    """

    tool: str
    model: str
    order: str
    verdict: str
    note: str = ""
    error: float = 0.0
    low: float = 0.0
    low_alone: float = 0.0
    casts: int = 0
    casts_alone: int = 0
    kernels: int = 0
    kernels_alone: int = 0

    @property
    def result(self) -> str:
        """The verdict; of what is usable "float32" if fewer ops compute in float16 than without the tool, and
        "integers" if fewer compute on integers than without the conversion."""
        if self.verdict == "usable" and self.kernels != self.kernels_alone:
            return "integers"
        if self.verdict == "usable" and not TOOLS[self.tool].quantizes and self.low < self.low_alone:
            return "float32"
        return self.verdict

    @property
    def words(self) -> str:
        """The note, or the numbers behind the result."""
        numbers = {
            "wrong": f"an output is off by {self.error:.3g} times its bound",
            "float32": f"{self.low:.0%} of compute ops in float16, {self.low_alone:.0%} without the tool",
            "integers": f"{self.kernels} integer kernels, {self.kernels_alone} without the conversion",
        }
        return self.note or numbers.get(self.result, "")


class Failed(Exception):
    """A step failed: a verdict and a note."""


def attempt(tool: str, name: str, order: str) -> Outcome:
    """What comes of a tool on a model. What is not caught here is for the process to die of."""
    with TemporaryDirectory() as folder:
        try:
            numbers = _Trial(TOOLS[tool], MODELS[name], Path(folder)).numbers(order)
        except Failed as failure:
            verdict, note = failure.args
            return Outcome(tool, name, order, verdict, note)
    return Outcome(tool, name, order, "usable" if numbers["error"] <= 1 else "wrong", **numbers)


@dataclass(frozen=True, slots=True)
class _Trial:
    tool: Tool
    shipped: Path
    folder: Path

    def numbers(self, order: str) -> dict[str, Any]:
        """The numbers of an Outcome. Failed if a step fails."""
        feeds = batches(self.shipped)[0]
        float32, other, low, both = (self.folder / f"{stage}.onnx" for stage in ("float32", "other", "low", "both"))
        onnx.save(onnx.load(self.shipped), float32)  # weights included: not every tool takes those of other files along
        alone = convert(float32)
        expected = reference = _run_plainly(float32, feeds)
        if order == "before" or self.tool.quantizes:
            self._apply(float32, other)
            with _step("tool", Exception):
                reference = _run_plainly(other, feeds)
        slack = dict.fromkeys(expected, 0.0)
        if self.tool.quantizes:
            slack = {name: float(_distance(expected[name], reference[name]).max(initial=0)) for name in expected}
        if order == "before":
            with _step("convert"):
                convert(other).save(both)
        else:
            alone.save(low)
            self._apply(low, both)
            # Quantizers of two models lie at two distances from the float32 model.
            reference, slack = expected, {name: 2 * size for name, size in slack.items()}
        error = self._error(onnx.load(float32).graph, both, feeds, reference, slack)
        numbers = {"error": error, **_counts(Model.load(both), alone.result)}
        if order == "before" and self.tool.quantizes:
            kernels = (_kernels(path, feeds, self.folder) for path in (both, other))
            numbers |= dict(zip(("kernels", "kernels_alone"), kernels, strict=True))
        return numbers

    def _apply(self, model: Path, out: Path) -> None:
        with _step("tool", Exception):
            self.tool.apply(model, out, self.shipped)

    def _error(
        self, graph: onnx.GraphProto, both: Path, feeds: Feeds, reference: Arrays, slack: Mapping[str, float]
    ) -> float:
        """The largest difference from the reference in units of the bound: on the CPU provider, and emulated."""
        with _step("open"):
            results = [_run(Model.load(both), feeds)]
        with _step("emulate"):
            results.append(_run(emulate(both, io="float32"), feeds))
        worst = 0.0
        for outputs in results:
            if outputs.keys() != reference.keys():
                raise Failed("wrong", f"outputs {list(outputs)} in place of {list(reference)}")
            for name, expected in reference.items():
                if outputs[name].shape != expected.shape:
                    raise Failed("wrong", f"{name} has shape {outputs[name].shape} in place of {expected.shape}")
                bound = rounding_bound(graph, expected, DType.FLOAT16) + slack[name]
                distance = float(_distance(expected, outputs[name]).max(initial=0))
                worst = max(worst, distance / bound if distance else 0.0)
        return worst


@contextmanager
def _step(verdict: str, *errors: type[Exception]) -> Iterator[None]:
    """Turn an error of a step into the verdict."""
    try:
        yield
    except (AmpRewriteError, *errors) as error:
        raise Failed(verdict, f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]) from error


def _run_plainly(path: Path, feeds: Feeds) -> Arrays:
    """The outputs by onnxruntime alone, without this package."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def _run(model: Model, feeds: Feeds) -> Arrays:
    """The outputs by this package's session, which takes the way round hazards of onnxruntime."""
    return {name: np.asarray(value) for name, value in Runner.open(model).run(feeds).items()}


def _distance(a: Array, b: Array) -> Array:
    return np.where(a == b, 0, np.abs(a.astype(np.float64) - b.astype(np.float64)))


def _counts(both: Model, alone: Model) -> dict[str, Any]:
    """Compute ops in float16 and Casts, with the tool and without."""
    totals, plain = (report_of(View.of(model)).totals for model in (both, alone))
    return {
        "low": totals.compute_lowered / max(totals.compute_ops, 1),
        "low_alone": plain.compute_lowered / max(plain.compute_ops, 1),
        "casts": totals.casts_existing,
        "casts_alone": plain.casts_existing,
    }


def _kernels(path: Path, feeds: Feeds, folder: Path) -> int:
    return sum(integer_kernels(run_and_count(onnx.load(path), feeds, folder)[1]).values())
