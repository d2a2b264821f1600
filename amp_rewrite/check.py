"""The last look at a converted model before anyone gets it."""

from __future__ import annotations

import onnx
import onnx.checker
import onnx.shape_inference

from amp_rewrite.errors import ConversionError, ModelError
from amp_rewrite.files.model import Model
from amp_rewrite.finding import Finding
from amp_rewrite.plan import Plan
from amp_rewrite.view import View


def check(source: Model, view: View, plan: Plan, result: Model) -> tuple[Finding, ...]:
    """What onnx has to say against the result that it also says against the source; raises for anything else.

    ModelError when the source was no valid model to begin with; ConversionError when the conversion broke it.
    """
    _check_types(view, plan, View.of(result))
    fault = _fault(result)
    if fault is None:
        return ()
    before = _fault(source)
    if before is None:
        raise ConversionError(
            f"the converted model is invalid, and nothing was written: {_line(fault)}; please report this"
        )
    if isinstance(fault, onnx.checker.ValidationError):
        raise ModelError(f"the model is invalid: {_line(before)}")
    return (Finding("unchecked", "shapes", f"onnx can not infer the model's own shapes: {_line(before)}"),)


_Fault = onnx.checker.ValidationError | onnx.shape_inference.InferenceError | UnicodeDecodeError


def check_source(source: Model) -> None:
    """ModelError when onnx's checker refuses a model, which is given back as it is where nothing can be lowered."""
    fault = _fault(source)
    if isinstance(fault, onnx.checker.ValidationError):
        raise ModelError(f"the model is invalid: {_line(fault)}")


def _fault(model: Model) -> _Fault | None:
    """What the checker, then strict shape inference, finds wrong with a model."""
    skeleton = model.skeleton()
    try:
        onnx.checker.check_model(skeleton)
        onnx.shape_inference.infer_shapes(skeleton, check_type=True, strict_mode=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError, UnicodeDecodeError) as fault:
        return fault
    return None


def _line(fault: Exception) -> str:
    return " ".join(str(fault).split())


def _check_types(view: View, plan: Plan, result: View) -> None:
    """The schemas' own types of every value that kept its name, against the plan."""
    wanted = {}
    for value in view.values:
        if value.id not in plan.rename and (dtype := plan.retype.get(value.id) or view.dtype(value.id)):
            wanted[view.scopes[value.scope].path, value.name] = dtype
    for cast in plan.casts:
        wanted[view.scopes[view.values[cast.value].scope].path, cast.name] = cast.to
    for bake in plan.bakes:
        wanted[view.scopes[view.values[bake.value].scope].path, bake.name] = bake.to
    for value in result.values:
        expected = wanted.get((result.scopes[value.scope].path, value.name))
        actual = result.dtype(value.id)
        if expected is not None and actual is not expected:
            found = actual.spelling if actual else "unknown"
            raise ConversionError(
                f"value {value.name!r} is {found} after the conversion, not {expected.spelling} as planned; "
                "nothing was written; please report this"
            )
