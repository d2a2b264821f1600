"""Pages, twins, gradients and training steps of models, against digests of what they were.

`make golden` runs this file as a program, which writes them as they are.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from amp_rewrite import AmpRewriteError, Converted, View, convert, diff, emulate, gradients
from amp_rewrite.dtypes import DType
from amp_rewrite.evidence.instrument.taps import tapped
from amp_rewrite.files.model import Model
from amp_rewrite.ir.shapes.infer import known_dims
from amp_rewrite.rewrite.shift.emit import refusal
from amp_rewrite.train import AdamW, training_step
from suites.models.test_golden_digests import MODELS, digest, parts, unversioned
from support.one_op import Case as OperatorCase
from support.one_op import cases, lowered
from support.paths import TESTS
from support.shifting import sandwiched, shifted_at_random
from support.train.nets import mlp, parsed
from support.train.vjp_case import Case

FILE = TESTS / "golden" / "products.json"
Products = Iterator[tuple[str, Callable[[], bytes]]]
"""Names, and functions that make bytes."""
OPTIMIZERS = (
    "sgd",
    "sgd,lr=0.1,momentum=0.9,nesterov=true,weight_decay=0.01,clipnorm=0.5",
    "rmsprop,momentum=0.5,global_clipnorm=1",
    "rmsprop,clipvalue=0.5",
    "adam",
    "adam,weight_decay=0.01",
    "adamw,lr=0.001,decay_biases_and_norms=false",
    "adagrad",
)
LOSSES = (
    "cross_entropy(y, t)",
    "cross_entropy(y, t, axis=-1, ignore_index=-100, label_smoothing=0.1)",
    "cross_entropy(y, t, class_weights=[1, 2, 0.5, 3], from_logits=False)",
    "categorical_cross_entropy(y, t, label_smoothing=0.1)",
    "kl_divergence(y, t)",
    "binary_cross_entropy(y, t)",
    "binary_cross_entropy(y, t, from_logits=False)",
    "mean_squared_error(y, t)",
    "mean_absolute_error(y, t)",
    "huber(y, t, delta=0.3)",
)
STEPS: Mapping[str, Mapping[str, Any]] = {
    **{text: {"optimizer": text} for text in OPTIMIZERS},
    **{text: {"loss": text} for text in LOSSES},
    "no decay of biases": {"optimizer": AdamW(decay_biases_and_norms=False)},
    "micro-batches": {"micro_batches": 4},
    "a fixed scale": {"loss_scale": 128},
    "bfloat16": {"policy": "mixed_bfloat16"},
    "float32": {"policy": "float32", "freeze": "b*"},
}


def of_model(path: Path) -> Products:
    """What is made of a shipped model and of its conversion to float16."""
    converted, view = convert(path), View.of(Model.load(path))
    for kind, make in PRODUCTS.items():
        yield kind, partial(make, path, view, converted)


def drawing(path: Path, view: View, converted: Converted) -> bytes:
    """The page without its texts, style and script."""
    page = re.sub(r"<(script|style)>.*?</\1>", "", converted.page().to_html(), flags=re.S)
    return re.sub(r">[^<]+<|(title|aria-label|content)=\"[^\"]*\"", "", page).encode()


def differences(path: Path, view: View, converted: Converted) -> bytes:
    document = json.loads(diff(path, converted).to_json())
    return json.dumps({key: rows for key, rows in document.items() if key in ("ops", "casts", "io")}).encode()


def with_loss(path: Path) -> ModelProto:
    """The model with the mean square of its first floating output as one more, "loss"."""
    model = onnx.load(path)
    first = next(v.name for v in model.graph.output if v.type.tensor_type.elem_type == TensorProto.FLOAT)
    model.graph.node.append(helper.make_node("Mul", [first, first], ["square of it"]))
    model.graph.node.append(helper.make_node("ReduceMean", ["square of it"], ["loss"], keepdims=0))
    model.graph.output.append(helper.make_tensor_value_info("loss", TensorProto.FLOAT, ()))
    return model


def matrices(model: ModelProto) -> Sequence[str]:
    return [t.name for t in model.graph.initializer if t.data_type == TensorProto.FLOAT and len(t.dims) > 1]


def backward(path: Path, view: View, converted: Converted) -> bytes:
    model = with_loss(path)
    return written(gradients(model, "loss", matrices(model)))


def step_of(path: Path, view: View, converted: Converted) -> bytes:
    model = with_loss(path)
    return written(training_step(model, loss="loss", optimizer="sgd", parameters=matrices(model)).model)


def taps(path: Path, view: View, converted: Converted) -> bytes:
    return written(tapped(view, floats(view)[::3], DType.FLOAT16).model)


def floats(view: View) -> Sequence[Any]:
    return [value for op in view.ops for value in op.results if view.holds_floats(value)]


def written(model: Model | ModelProto) -> bytes:
    return unversioned(model.to_proto() if isinstance(model, Model) else model)


PRODUCTS: Mapping[str, Callable[[Path, View, Converted], bytes]] = {
    "page": drawing,
    "difference": differences,
    "emulation": lambda path, view, converted: written(emulate(converted.model)),
    "gradients": backward,
    "step": step_of,
    "taps": taps,
}


def of_rules(module: str) -> Products:
    """The gradients of each case of some gradient rules."""
    for case in import_module(f"unit.rewrite.{module}").CASES:
        for opset in case.opsets:
            yield f"{case.name}, opset {opset}", partial(gradients_of, case, opset)


def gradients_of(case: Case, opset: int) -> bytes:
    return written(gradients(case.model(opset), "loss", case.parameters))


def of_operators() -> Products:
    """Emulations and shifts of each case of an operator, and what conversions make of one case of each."""
    for case in cases():
        yield case.name, partial(joined, EMULATIONS, case)
    for op_type, case in {case.op_type: case for case in cases()}.items():
        yield op_type, partial(joined, CONVERSIONS, case)
    contrib = import_module("unit.rewrite.shift.test_contrib_records")
    for name, node in contrib.NODES.items():
        yield name, partial(joined, (decided, shifted), contrib.built(node)[0])


def joined(makers: Sequence[Callable[[Any], bytes]], source: OperatorCase | ModelProto) -> bytes:
    found = b""
    for make in makers:
        try:
            found += make(source)
        except AmpRewriteError as error:
            found += type(error).__name__.encode()
    return found


def in_float16(case: OperatorCase) -> ModelProto:
    low = lowered(case, DType.FLOAT16)
    return low[0] if low is not None else case.model


def decided(model: ModelProto, **options: Any) -> bytes:
    converted = convert(model, **options)
    return b"".join(parts(converted.report)) + unversioned(converted.model)


def shifted(model: ModelProto) -> bytes:
    view = View.of(Model.load(sandwiched(model)))
    return b"" if refusal(view) else b"".join(written(shifted_at_random(view, seed).view.model) for seed in range(2))


def dimensions(case: OperatorCase) -> bytes:
    """The dimensions of results where those of inputs have names: equal ones the same."""
    model = ModelProto.FromString(case.model.SerializeToString())
    for value in model.graph.input:
        for dim in value.type.tensor_type.shape.dim:
            dim.dim_param = f"d{dim.dim_value}"
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")
    return repr(sorted(known_dims(View.of(Model.load(model))).items())).encode()


def of_unknown_rank(model: ModelProto) -> ModelProto:
    """The model with a Reshape by a shape that is fed before its first input."""
    made = ModelProto.FromString(model.SerializeToString())
    for value in made.graph.input[:1]:
        for op in made.graph.node:
            op.input[:] = ["reshaped" if name == value.name else name for name in op.input]
        made.graph.node.insert(0, helper.make_node("Reshape", [value.name, "new shape"], ["reshaped"]))
        made.graph.input.append(helper.make_tensor_value_info("new shape", TensorProto.INT64, ["rank"]))
    return made


EMULATIONS: Sequence[Callable[[OperatorCase], bytes]] = (
    lambda case: written(emulate(in_float16(case))),
    lambda case: written(emulate(of_unknown_rank(in_float16(case)))),
    lambda case: shifted(case.model),
    dimensions,
)
CONVERSIONS: Sequence[Callable[[OperatorCase], bytes]] = (
    lambda case: decided(case.model, level="lower-all"),
    lambda case: decided(in_float16(case), keep="op=*"),
)


def of_steps() -> Products:
    """Steps of small networks, by optimizer, loss and option."""
    for name, options in STEPS.items():
        yield name, partial(step_with, mlp(), **{"loss": "cross_entropy(y, t)", "optimizer": "sgd", **options})
    for mode in (False, True):
        yield (
            f"training_mode={mode}",
            partial(step_with, normalized(), loss="mean_squared_error(y, z)", training_mode=mode),
        )


def step_with(model: ModelProto, **options: Any) -> bytes:
    return written(training_step(model, **options).model)


def normalized() -> ModelProto:
    """A convolution, its normalization, and a dropout that can drop."""
    head = "net (float[N,3,8,8] x) => (float[N,4,1,1] y) { c = Conv (x, w) n = BatchNormalization (c, s, b, m, v)"
    model = parsed(f"{head} d = Dropout (n, rate, on) p = GlobalAveragePool (d) y = Relu (p) }}")
    shapes = {"w": (4, 3, 3, 3), "s": (4,), "b": (4,), "m": (4,), "v": (4,)}
    arrays = {
        name: np.linspace(0.5, 2, math.prod(shape), dtype=np.float32).reshape(shape) for name, shape in shapes.items()
    }
    arrays |= {"rate": np.array(0.25, np.float32), "on": np.array(True)}
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items())
    return model


RULES = sorted(
    path.stem for path in (TESTS / "unit" / "rewrite").glob("test_vjp_*.py") if path.stem != "test_vjp_table"
)
SOURCES: Mapping[str, Callable[[], Products]] = {
    **{name: partial(of_model, path) for name, path in sorted(MODELS.items())},
    **{name: partial(of_rules, name) for name in RULES},
    "operators": of_operators,
    "steps": of_steps,
}


def digests(products: Products) -> dict[str, str]:
    found = {}
    for name, make in products:
        try:
            found[name] = digest(make())
        except AmpRewriteError as error:
            found[name] = type(error).__name__
    return found


STORED: dict[str, Any] = json.loads(FILE.read_text("utf-8")) if FILE.is_file() else {"versions": []}
VERSIONS = [metadata.version(name) for name in ("onnx", "numpy")]


def test_every_source_has_its_digests() -> None:
    assert STORED.keys() == {"versions", *SOURCES}


@pytest.mark.skipif(STORED["versions"] != VERSIONS, reason=f"digests are those under onnx, numpy {STORED['versions']}")
@pytest.mark.parametrize("name", SOURCES)
def test_products_are_what_they_were(name: str) -> None:
    assert digests(SOURCES[name]()) == STORED[name]


if __name__ == "__main__":
    made = {name: digests(source()) for name, source in SOURCES.items()}
    FILE.write_text(json.dumps({"versions": VERSIONS, **made}, indent=1) + "\n", "utf-8")
    sys.stdout.write(f"{FILE}: {sum(map(len, made.values()))} digests\n")
