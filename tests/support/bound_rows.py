"""Models of one rule of a bound, as text, with inputs that reach the bound or try to exceed it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime
from onnx import ModelProto, TensorProto, helper, numpy_helper

from amp_rewrite.decide.bounds.state import Ball, State
from support.bound_check import Probe

Feed = Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """A model of the inputs in `signature`, the last value of whose `body` is y, and inputs for it.

    `given`: ranges of inputs; `constants`: initializers by name, floats if they are not integers.
    """

    signature: str
    body: str
    feeds: Sequence[Feed]
    given: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    opset: int = 21

    def model(self) -> ModelProto:
        """The model. The rank of y is that of a run."""
        head = f'<ir_version: 10, opset_import: ["": {self.opset}, "com.microsoft": 1]>'
        model = onnx.parser.parse_model(f"{head} g ({self.signature}) => (float y) {{ {self.body} }}")
        model.graph.initializer.extend(numpy_helper.from_array(single(a), name) for name, a in self.constants.items())
        model.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", TensorProto.FLOAT, None))
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        rank = session.run(["y"], self.fed()[0])[0].ndim
        shape = [f"D{axis}" for axis in range(rank)]
        model.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", TensorProto.FLOAT, shape))
        return model

    def fed(self) -> list[dict[str, np.ndarray]]:
        """The inputs as arrays."""
        return [{name: single(array) for name, array in feed.items()} for feed in self.feeds]

    def probe(self) -> Probe:
        """The model with its walk."""
        return Probe(self.model(), inputs=self.given)


def single(array: Any) -> np.ndarray:
    """An array of float32, or of its own type if that is no float64."""
    array = np.asarray(array)
    return array.astype(np.float32) if array.dtype == np.float64 else array


def missed(state: State, arrays: Sequence[np.ndarray], within: float) -> dict[str, str]:
    """What no run comes within this share of, by part: ends of the box, the radius of the ball, the sum."""
    found = {}
    lo, hi = float(np.min(state.lo)), float(np.max(state.hi))
    least, most = (float(by([by(a) for a in arrays])) for by in (np.min, np.max))
    if max(least - lo, hi - most) > within * max(-lo, hi):
        found["box"] = f"from {lo:g} to {hi:g}, runs from {least:g} to {most:g}"
    if state.ball is not None and (longest := max(_longest(state.ball, array) for array in arrays)) < 1 - within:
        found["ball"] = f"at most {longest:.1%} of the radius"
    if np.isfinite(state.total):
        total = max(float(array.sum(axis=state.along).max()) for array in arrays)
        if total < (1 - within) * state.total:
            found["sum"] = f"{state.total:g}, runs to {total:g}"
    return found


def parts(state: State) -> set[str]:
    """The parts of a state that bound something."""
    return {"box", *(["ball"] if state.ball is not None else []), *(["sum"] if np.isfinite(state.total) else [])}


def _longest(ball: Ball, array: np.ndarray) -> float:
    away = (array - (0.0 if ball.center is None else ball.center)) / (1.0 if ball.scale is None else ball.scale)
    norms = np.sqrt(np.square(away).sum(axis=ball.axes, keepdims=True))
    return float((norms / np.maximum(ball.radius, 1e-30)).max())
