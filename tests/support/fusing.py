"""Helpers for tests of fusions: name a model's nodes, bring it into standard form, run it unoptimized."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx.parser
from onnx import ModelProto

from amp_rewrite.dtypes import DType
from amp_rewrite.files.model import Model
from amp_rewrite.ir.view import View
from amp_rewrite.rewrite.passes.canonicalize import fuse_operators
from amp_rewrite.rewrite.replacement import Context
from amp_rewrite.settings.choices import Target
from support import objections


def parsed(text: str) -> ModelProto:
    """Parse a model and name each node after its first result."""
    model = onnx.parser.parse_model(text)
    for node in model.graph.node:
        node.name = f"the_{node.output[0]}"
    return model


def reducing(head: str, body: str, opset: int) -> ModelProto:
    """Parse a model from head and body; below opset 18 the axes of its reductions over `last` become attributes."""
    if opset < 18:
        body = re.sub(r"(ReduceMean|ReduceMax) \((\w+), last\)", r"\1 <axes = [-1]> (\2)", body)
    return parsed(f'<ir_version: 8, opset_import: ["": {opset}]>\n{head} {{ {body} }}')


def standard(model: ModelProto, **options: object) -> tuple[ModelProto, list[tuple[str, str, str]]]:
    """Return the model in standard form, with its types checked, and the findings."""
    arguments = {"target": Target.ORT_CUDA, **options}
    context = Context(arguments.pop("to", DType.FLOAT16), low_only=True)  # type: ignore[arg-type]
    view, findings = fuse_operators(View.of(Model.load(model)), context, **arguments)  # type: ignore[arg-type]
    onnx.checker.check_model(view.model.proto, full_check=True)
    return view.model.to_proto(), [(f.kind, f.subject, f.message) for f in findings]


def kinds(model: ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


def outputs_of(model: ModelProto, feed: Mapping[str, np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
    """Run a model without optimizations."""
    return objections.run(model, feed, "DISABLE_ALL")  # type: ignore[return-value]
