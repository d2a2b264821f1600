"""Operators between two matrix products, so that colors propagate to them from both sides."""

from functools import cache
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from amp_rewrite.files.protos import clone

LATEST = 26


@cache
def sandwiches() -> dict[str, ModelProto]:
    """Sandwich the last of onnx's own node tests of each operator on float tensors.

    The first float input of the test is computed by a product of the graph input x; the other inputs are initializers
    with the test's values. Each float result is read by another product; other results are outputs. Tests with more
    than one node, with sequences or optionals, or without a float input are left out.
    """
    import warnings

    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the cases provoke overflow on purpose
        found = {}
        for case in collect_testcases(None):
            if case.model is None or case.name.endswith("_expanded") or not case.data_sets:
                continue
            (node, *more), imports = case.model.graph.node, {o.domain: o.version for o in case.model.opset_import}
            if not more and imports.keys() == {""}:
                model = _sandwich(case.model, *case.data_sets[0])
                found |= {node.op_type: model} if model is not None and _opens(model) else {}
    return found


def _sandwich(model: ModelProto, given: Any, expected: Any) -> ModelProto | None:
    graph = model.graph
    kinds = [v.type.WhichOneof("value") for v in (*graph.input, *graph.output)]
    if set(kinds) != {"tensor_type"} or graph.initializer:
        return None
    fed = {v.name: _single(a) for v, a in zip(graph.input, given, strict=True)}
    made = {v.name: _single(a) for v, a in zip(graph.output, expected, strict=True)}
    filling = next((n for n, a in fed.items() if a.dtype == np.float32 and a.size), None)
    folded = [n for n, a in made.items() if a.dtype == np.float32 and a.size]
    if filling is None or filling in made or any(a.dtype.name == "bfloat16" for a in fed.values()):
        return None
    constants = {name: array for name, array in fed.items() if name != filling}
    constants |= {"sw_w": np.eye(4, dtype=np.float32), "sw_flat": np.array([-1])}
    constants["sw_take"] = np.arange(fed[filling].size).reshape(fed[filling].shape) % 16
    before = [_node("MatMul", "sw_x sw_w", "sw_a"), _node("Reshape", "sw_a sw_flat", "sw_b")]
    before.append(_node("Gather", "sw_b sw_take", filling))
    after, outputs = [], [v for v in graph.output if v.name not in folded]
    for name in folded:
        constants[f"sw_fold_{name}"] = np.arange(16).reshape(4, 4) % made[name].size
        after.append(_node("Reshape", f"{name} sw_flat", f"sw_{name}_b"))
        after.append(_node("Gather", f"sw_{name}_b sw_fold_{name}", f"sw_{name}_c"))
        after.append(_node("MatMul", f"sw_{name}_c sw_w", f"sw_{name}_y"))
        outputs.append(helper.make_tensor_value_info(f"sw_{name}_y", TensorProto.FLOAT, [4, 4]))
    inputs = [helper.make_tensor_value_info("sw_x", TensorProto.FLOAT, [4, 4])]
    tensors = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    out = clone(model)
    if out.opset_import[0].version > LATEST:  # an older version of the operator may support the test
        out.opset_import[0].version = LATEST
        out.ir_version = helper.find_min_ir_version_for(out.opset_import)
    out.graph.CopyFrom(helper.make_graph([*before, *graph.node, *after], "sandwich", inputs, outputs, tensors))
    return out


def _opens(model: ModelProto) -> bool:
    try:
        onnx.checker.check_model(model)
    except onnx.checker.ValidationError:
        return False
    return True


def _single(given: object) -> np.ndarray:
    """Return the array, with doubles as float32."""
    array = numpy_helper.to_array(given) if isinstance(given, TensorProto) else np.asarray(given)
    return array.astype(np.float32) if array.dtype == np.float64 else array


def _node(op_type: str, reads: str, result: str) -> NodeProto:
    return helper.make_node(op_type, reads.split(), [result])
