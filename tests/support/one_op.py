"""One-op models in a low type, from the float32 cases of onnx's own node tests, and distances between results."""

import pickle
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest

import ml_dtypes
import numpy as np
import onnx
import onnx.parser
from onnx import ModelProto, TensorProto, helper, numpy_helper

from amp_rewrite.dtypes import DType
from amp_rewrite.files.model import Model
from amp_rewrite.files.protos import clone
from amp_rewrite.ir.schema import DTYPE_ATTRIBUTES, set_element_type, type_of_proto
from amp_rewrite.ir.view import Role, View

NEWEST_OPSET, NEWEST_IR = 26, 13
PER_OP = 3
"""The largest number of cases per op, spread evenly over all of them."""


@dataclass(frozen=True, slots=True)
class Case:
    """A float32 model of one op and its inputs."""

    name: str
    op_type: str
    model: ModelProto
    feeds: Mapping[str, object]


@cache
def cases() -> tuple[Case, ...]:
    """Collect cases of one node with float32 inputs or outputs, at most PER_OP of each op.

    onnx draws their inputs from numpy's global generator at import, so it is imported in a separate process with a
    fixed seed.
    """
    done = subprocess.run([sys.executable, "-W", "ignore", __file__], stdout=subprocess.PIPE, check=True)
    found: dict[str, list[Case]] = {}
    for name, model, feeds in pickle.loads(done.stdout):
        proto = ModelProto.FromString(model)
        op_type = proto.graph.node[0].op_type
        found.setdefault(op_type, []).append(Case(name, op_type, proto, feeds))
    chosen = list(_own())
    for op_type in sorted(found):
        of_op = found[op_type]
        at = np.linspace(0, len(of_op) - 1, min(PER_OP, len(of_op))).round().astype(int)
        chosen.extend(of_op[i] for i in sorted(set(at.tolist())))
    return tuple(chosen)


# Ops that onnx's tests have only with other types or inside larger graphs.
OWN = {
    "Celu": "y = Celu <alpha = 2.0> (x)",
    "CumProd": "y = CumProd (x, axis)",
    "CumSum": "y = CumSum (x, axis)",
    "Einsum": 'y = Einsum <equation = "ij,kj->ik"> (x, x)',
    "Equal": "y = Equal (x, x)",
    "NonZero": "y = NonZero (x)",
    "Trilu": "y = Trilu (x)",
}
_OWN_TYPES = {"Equal": "bool[4, 6] y", "NonZero": "int64[2, N] y", "Einsum": "float[4, 4] y"}


def _own() -> Iterator[Case]:
    x = np.random.default_rng(5).standard_normal((4, 6)).astype(np.float32)
    for op_type, text in OWN.items():
        axis = ", int64 axis" if "axis" in text else ""
        y = _OWN_TYPES.get(op_type, "float[4, 6] y")
        opset = NEWEST_OPSET if op_type == "CumProd" else 22
        header = f'<ir_version: 10, opset_import: ["": {opset}]> g (float[4, 6] x{axis}) => ({y})'
        feeds = {"x": x} | ({"axis": np.array(1)} if axis else {})
        yield Case(op_type.lower(), op_type, onnx.parser.parse_model(f"{header} {{ {text} }}"), feeds)


def _collect() -> Iterator[tuple[str, bytes, dict[str, object]]]:
    np.random.seed(0)
    from onnx.backend.test.case.node import collect_testcases

    for case in collect_testcases(None):
        model = case.model
        if model is None or len(model.graph.node) != 1 or not case.data_sets or not _float32(model):
            continue
        arrays = [numpy_helper.to_array(v) if isinstance(v, TensorProto) else v for v in case.data_sets[0][0]]
        feeds = {v.name: _array(a) for v, a in zip(model.graph.input, arrays, strict=True)}
        # BitCast needs equal widths; training ops draw random numbers; numpy cannot pass narrow types to onnxruntime.
        if model.graph.node[0].op_type != "BitCast" and "training" not in case.name and not _narrow(feeds.values()):
            yield case.name, _loadable(model).SerializeToString(), feeds


def _array(value: object) -> object:
    return value if value is None or isinstance(value, list) else np.asarray(value)


def _narrow(values: Iterable[object]) -> bool:
    return any(a.dtype.itemsize == 1 and a.dtype.kind not in "iub" for a in flat(list(values)))


def _loadable(model: ModelProto) -> ModelProto:
    """Copy a model and reduce its opset and IR version to the newest ones that onnxruntime opens."""
    out = clone(model)
    out.ir_version = min(out.ir_version, NEWEST_IR)
    for opset in out.opset_import:
        opset.version = min(opset.version, NEWEST_OPSET)
    return out


def _float32(model: ModelProto) -> bool:
    domain = model.graph.node[0].domain
    return domain in ("", "ai.onnx") and any(
        "elem_type: 1\n" in str(v.type) for v in (*model.graph.input, *model.graph.output)
    )


def lowered(case: Case, low: DType) -> tuple[ModelProto, frozenset[str]] | None:
    """Return the case's model with every type variable in `low` that allows it, and the names of its low inputs.

    None if the op has no such variable.
    """
    view = View.of(Model.load(case.model))
    op = view.ops[0]
    if op.signature is None:
        return None
    model = clone(case.model)
    node = model.graph.node[0]
    changed = set()
    for variable in view.variables[0]:
        if variable.type and variable.type.dtype is DType.FLOAT and op.signature.admits(variable.name, low):
            changed |= {op.inputs[i] for i in variable.inputs}
            if not variable.inputs:
                _state(node, op.domain, op.op_type, low)
                changed |= {op.outputs[o] for o in variable.outputs}
    names = frozenset(view.value_name(v) for v in changed if v is not None)
    if not names:
        return None
    for formal in model.graph.input:
        if formal.name in names:
            set_element_type(formal.type, low)
    after = View.of(Model.load(model))
    types = {v.name: after.dtype(v.id) for v in after.values}
    for formal in model.graph.output:
        dtype = types[formal.name]
        assert dtype is not None
        set_element_type(formal.type, dtype)
    if not any(t is not None and t.low for t in types.values()):
        return None
    fed = {v.name for v in after.values if v.role is Role.INPUT}
    return model, names & fed


def _state(node: onnx.NodeProto, domain: str, op_type: str, low: DType) -> None:
    """Set the low type in an op's output type attribute."""
    if op_type in ("Constant", "ConstantOfShape"):
        for a in node.attribute:
            if a.HasField("t") and a.t.data_type == TensorProto.FLOAT:
                a.t.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(a.t).astype(low.numpy)))
    elif (domain, op_type) in DTYPE_ATTRIBUTES:
        name = DTYPE_ATTRIBUTES[domain, op_type]
        others = [a for a in node.attribute if a.name != name]
        del node.attribute[:]
        node.attribute.extend([*others, helper.make_attribute(name, low.code)])


def fed(case: Case, names: frozenset[str], low: DType, factor: float) -> dict[str, object]:
    """Scale the inputs in `names` by a factor and round them to the low type."""

    def rounded(value: object) -> object:
        if value is None or isinstance(value, list):
            return value and [rounded(v) for v in value]
        with np.errstate(all="ignore"):
            return np.asarray(np.asarray(value, np.float64) * factor).astype(np.float32).astype(low.numpy)

    return {name: rounded(v) if name in names else v for name, v in case.feeds.items()}


def widened(value: object) -> object:
    """Widen arrays of a low type to float32, also in lists; leave everything else unchanged."""
    if isinstance(value, list):
        return [widened(v) for v in value]
    return value.astype(np.float32) if getattr(value, "dtype", None) in (np.float16, ml_dtypes.bfloat16) else value


def flat(values: object) -> Iterator[np.ndarray]:
    """Yield every array in a list of arrays, sequences and empty optionals."""
    if isinstance(values, (list, tuple)):
        for value in values:
            yield from flat(value)
    elif values is not None:
        yield np.asarray(values)


def largest_distance(found: object, expected: object, low: DType, *, scaled: bool = False) -> float:
    """Return the largest `distance` between two lists of outputs; infinite if one has more arrays."""
    pairs = list(zip_longest(flat(found), flat(expected)))
    return max((np.inf if a is None or b is None else distance(a, b, low, scaled=scaled) for a, b in pairs), default=0)


def distance(found: np.ndarray, expected: np.ndarray, low: DType, *, scaled: bool = False) -> float:
    """Return the largest number of low-type steps between two arrays, after rounding both to that type.

    Infinity is the step after the largest value; NaN only matches NaN; other types must be equal. `scaled`: steps have
    the size at the largest finite magnitude expected, for sums with cancellation.
    """
    if found.shape != expected.shape:
        return np.inf
    if found.size == 0:
        return 0.0
    if found.dtype.kind in "iubOSU" or expected.dtype.kind in "iub":
        return 0.0 if found.dtype == expected.dtype and np.array_equal(found, expected) else np.inf
    with np.errstate(all="ignore"):
        a, b = found.astype(low.numpy), expected.astype(low.numpy)
    wide, right = a.astype(np.float64), b.astype(np.float64)
    nan, infinite = np.isnan(wide), np.isinf(wide) | np.isinf(right)
    if not np.array_equal(nan, np.isnan(right)):
        return np.inf
    steps = np.where(nan, 0, np.abs(_ordinal(a) - _ordinal(b))).astype(np.float64)
    if scaled:
        top = np.max(np.abs(right), where=np.isfinite(right), initial=low.tiny)
        ulp = 2.0 ** np.floor(np.log2(top)) * low.eps
        with np.errstate(all="ignore"):
            steps = np.where(nan | infinite, steps, np.minimum(steps, np.abs(wide - right) / ulp))
    return float(np.max(steps))


def holds_low_values(found: object, declared: object, low: DType) -> bool:
    """Whether the emulation's float32 outputs are representable in the low type if the model declares that type."""
    for value, formal in zip(found, declared, strict=True):  # type: ignore[call-overload]
        kind = type_of_proto(formal.type)
        for array in flat(value):
            if kind is not None and kind.dtype is low:
                with np.errstate(all="ignore"):
                    again = array.astype(low.numpy).astype(np.float32)
                if array.dtype != np.float32 or not np.array_equal(again, array, equal_nan=True):
                    return False
    return True


def _ordinal(values: np.ndarray) -> np.ndarray:
    """Number values of a low type in ascending order; both zeros are 0."""
    bits = np.ascontiguousarray(values).view(np.uint16).astype(np.int64).reshape(values.shape)
    return np.where(bits & 0x8000, -(bits & 0x7FFF), bits)


if __name__ == "__main__":
    sys.stdout.buffer.write(pickle.dumps(list(_collect())))
