"""Export of PyTorch modules for training: every parameter and buffer becomes a separate initializer with its name.

An exporter for inference merges equal weights, folds others into constants and transposes some. Therefore the module is
exported with all parameters and buffers as inputs, which it leaves unchanged; `bind` then makes them initializers.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from amp_rewrite.errors import AmpRewriteError, TrainingError, count, one_line
from amp_rewrite.files.model import Model
from amp_rewrite.ir.names import as_names, claimed
from amp_rewrite.runtime.runner import Runner, SessionOptions
from amp_rewrite.train.arguments import checked_arguments, quoted, whole_number
from amp_rewrite.train.interchange import torch_forms
from amp_rewrite.train.objective.parameters import BUFFER, NO_GRAD, write_module
from amp_rewrite.train.step.assembly import bind

if TYPE_CHECKING:
    import torch

OPSET = 20
"""Default opset: from 22 on, onnxruntime has no CUDA kernels for MaxPool and Dropout; below 20, Gelu is not an op."""
_MIN_OPSET = 18
"""Minimum opset of PyTorch's exporter."""


@checked_arguments()
def from_torch(
    module: torch.nn.Module,
    example: object,
    *,
    outputs: str | Sequence[str] | None = None,
    dynamic: Mapping[str, Mapping[int, str]] | None = None,
    dropout: bool = False,
    opset: int = OPSET,
) -> Model:
    """Export a PyTorch module with every parameter as an initializer, ready for `training_step`.

    The module is exported in evaluation mode, unchanged. Parameters with requires_grad=False and buffers are not
    trained. `detach()`, `torch.no_grad()` and a padding_idx stop gradients. Inputs are named after the arguments of
    `forward`. A step's report names modules with missing dropout, custom gradients, or other results in training mode.

    Args:
        module: the module, in float32.
        example: an example input, a tuple of inputs, or a mapping from argument names to inputs; tensors or arrays.
        outputs: names of the outputs; by default the keys of a returned mapping, otherwise "output" or "output_0" …
        dynamic: names of the dynamic dimensions, by input and axis; by default "batch" for the first axis of each
            input, except inputs of one row if others have more.
        dropout: True keeps dropout, including attention dropout, as ops that `training_mode=True` enables.
        opset: the ai.onnx opset.

    Returns:
        The model.

    Raises:
        TrainingError: PyTorch or onnxscript is missing, the module is not in float32, or it cannot be exported.

    Example:
        >>> import torch
        >>> from amp_rewrite.train import from_torch, training_step
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
        >>> step = training_step(from_torch(net, torch.ones(2, 4)), loss="cross_entropy(output, label)")
        >>> step.parameters
        ('0.weight', '0.bias', '2.weight', '2.bias')
    """
    try:
        import onnxscript  # noqa: F401
        import torch
    except ImportError as cause:
        raise TrainingError(
            f"from_torch needs PyTorch and onnxscript, but {cause.name} is not installed; pip install torch onnxscript"
        ) from cause
    opset = whole_number("opset", opset, _MIN_OPSET)
    _check_module(torch, module)
    tensors_by_name = _inputs(torch, module, example)
    axes = _axes(tensors_by_name, dynamic)
    inputs, state = _with_two_rows(torch, tensors_by_name, axes), _ModuleState.of(torch, module)

    def call(tensors: dict[str, Any]) -> dict[str, Any]:
        return result_tensors(torch, state.call(torch, module, inputs, tensors))

    with _quiet():
        findings = torch_forms.ForwardFindings.of(torch, module, call, dropout)
        names = tuple(findings.outputs) if outputs is None else as_names(outputs)
        if len(names) != (returned := len(findings.outputs)):
            counts = f"{count(len(names), 'name')}, but the module returns {count(returned, 'tensor')}"
            raise TrainingError(f"outputs has {counts}; pass one name for each")
        with torch_forms.training(module, findings.exported), torch_forms.exportable_forms(torch):
            program = _export(torch, module, inputs, state, names, axes, opset)
    model = bind(program, {name: tensor.detach().cpu().numpy() for name, tensor in state.tensors.items()})
    torch_forms.mark(torch, module, model, dropout)
    model.proto.graph.name = type(module).__name__
    if not findings.random:
        _check_outputs(model, inputs, findings.outputs)
    write_module(model, state.declared, findings.notes)
    return model


# -- torch -------------------------------------------------------------------------------------------


def _check_module(torch: Any, module: object) -> None:
    if not isinstance(module, torch.nn.Module):
        raise TrainingError(f"{quoted(module)} is not a PyTorch module; pass an instance of torch.nn.Module")
    if isinstance(module, torch.jit.ScriptModule):
        raise TrainingError("PyTorch cannot export a module compiled by torch.jit; pass the original module")


@contextmanager
def _quiet() -> Iterator[None]:
    before = logging.root.manager.disable
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(before)


@dataclass(frozen=True, slots=True)
class _ModuleState:
    """The parameters and floating-point buffers of a module.

    `tensors`: the tensors by name. `declared`: the `FrozenReasons`. `places`: the first name of a tensor, by the full
    name of each attribute with that tensor.
    """

    tensors: Mapping[str, Any]
    declared: Mapping[str, str]
    places: Mapping[str, str]

    @classmethod
    def of(cls, torch: Any, module: Any) -> _ModuleState:
        parameters = dict(module.named_parameters())
        buffers = {name: b for name, b in module.named_buffers() if b.is_floating_point()}
        tensors = {**parameters, **buffers}
        for name, tensor in tensors.items():
            if torch.nn.parameter.is_lazy(tensor):
                raise TrainingError(f"{name!r} of the module has no shape yet; call the module once with the example")
            if tensor.dtype is not torch.float32:
                kind = str(tensor.dtype).removeprefix("torch.")
                raise TrainingError(
                    f"{name!r} of the module is {kind}, but trained weights must be float32; pass module.float()"
                )
        if not parameters:
            raise TrainingError("the module has no parameters, so there is nothing to train")
        first = {id(t): name for name, t in (*module.named_parameters(), *module.named_buffers())}
        places = {
            f"{at}.{name}" if at else name: first[id(tensor)]
            for at, part in module.named_modules()
            for name, tensor in (*part._parameters.items(), *part._buffers.items())
            if tensor is not None
        }
        trained = {name: "" if p.requires_grad else NO_GRAD for name, p in parameters.items()}
        return cls(tensors, {**trained, **dict.fromkeys(buffers, BUFFER)}, places)

    def call(self, torch: Any, module: Any, inputs: Mapping[str, Any], tensors: dict[str, Any]) -> Any:
        """Call the module with these tensors in place of its own; in-place changes are written back to `tensors`."""
        by_place = {place: tensors[name] for place, name in self.places.items() if name in tensors}
        args, kwargs = _arguments(inputs)
        result = torch.func.functional_call(module, by_place, args, kwargs, tie_weights=False)
        tensors.update((name, by_place[name]) for name in tensors)
        return result


# -- inputs and outputs --------------------------------------------------------------------------------


def _inputs(torch: Any, module: Any, example: object) -> dict[str, Any]:
    arguments = [
        p.name
        for p in inspect.signature(module.forward).parameters.values()
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY, p.POSITIONAL_ONLY)
    ]
    if isinstance(example, Mapping):
        values_by_name = dict(example)
    else:
        values = example if isinstance(example, (tuple, list)) else (example,)
        extra = [f"input_{i}" for i in range(len(arguments), len(values))]
        values_by_name = dict(zip([*arguments, *extra], values, strict=False))
    try:
        tensors = {name: torch.as_tensor(_float64_as_float32(value)) for name, value in values_by_name.items()}
    except (RuntimeError, TypeError, ValueError) as cause:
        raise TrainingError(
            f"the example must be a tensor or an array, or a tuple or mapping of them, not {quoted(example)}"
        ) from cause
    if not tensors:
        raise TrainingError("the example is empty; pass the inputs of the module")
    return tensors


def _float64_as_float32(value: object) -> object:
    return value.astype(np.float32) if isinstance(value, np.ndarray) and value.dtype == np.float64 else value


def _with_two_rows(torch: Any, inputs: Mapping[str, Any], axes: Mapping[str, Mapping[int, str]]) -> dict[str, Any]:
    longer = {dim for name, dims in axes.items() for axis, dim in dims.items() if inputs[name].shape[axis] != 1}
    example = dict(inputs)
    for name, dims in axes.items():
        for axis in (axis for axis, dim in dims.items() if dim not in longer):
            example[name] = torch.cat((example[name], example[name]), axis)
    return example


def _axes(inputs: Mapping[str, Any], dynamic: Mapping[str, Mapping[int, str]] | None) -> dict[str, dict[int, str]]:
    if dynamic is None:
        rows = {tensor.shape[0] for tensor in inputs.values() if tensor.ndim}
        shared = {1} if len(rows) > 1 else set()  # one row that is broadcast to a larger batch
        return {n: {0: "batch"} if t.ndim and t.shape[0] not in shared else {} for n, t in inputs.items()}
    legal = {name: range(tensor.ndim) for name, tensor in inputs.items()}
    if not isinstance(dynamic, Mapping) or not all(
        isinstance(dims, Mapping) and set(dims) <= set(legal.get(name, ())) for name, dims in dynamic.items()
    ):
        raise TrainingError(
            f"dynamic must name axes of the inputs {', '.join(inputs)}, as in"
            f" dynamic={{{next(iter(inputs))!r}: {{0: 'batch'}}}}, not {quoted(dynamic)}"
        )
    return {name: dict(dynamic.get(name, {})) for name in inputs}


def result_tensors(torch: Any, result: Any) -> dict[str, Any]:
    """Return the tensors in a module's result by name: the keys of a mapping, "output", or "output_0" …"""
    if isinstance(result, torch.Tensor):
        return {"output": result}
    items = result.items() if isinstance(result, Mapping) else ((f"output_{i}", v) for i, v in enumerate(result))
    return {name: value for name, value in items if isinstance(value, torch.Tensor)}


def _arguments(inputs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    positional = any(name.startswith("input_") and name[6:].isdigit() for name in inputs)
    return (tuple(inputs.values()), {}) if positional else ((), dict(inputs))


# -- export --------------------------------------------------------------------------------------------


def _export(
    torch: Any,
    module: Any,
    inputs: Mapping[str, Any],
    state: _ModuleState,
    outputs: Sequence[str],
    axes: Mapping[str, Mapping[int, str]],
    opset: int,
) -> Any:
    names, tensors = list(inputs), list(state.tensors.values())

    class Functional(torch.nn.Module):  # type: ignore[misc]
        """The module as a function of its inputs, parameters and buffers."""

        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, values: list[Any], weights: list[Any]) -> Any:
            tensors, arguments = dict(zip(state.tensors, weights, strict=True)), dict(zip(names, values, strict=True))
            with torch_forms.stopped_gradients(torch):
                result = state.call(torch, self.module, arguments, tensors)
            return tuple(result_tensors(torch, result).values())

    dims = {dim: torch.export.Dim(dim, min=1) for by_axis in axes.values() for dim in by_axis.values()}
    shapes = [{axis: dims[dim] for axis, dim in axes[name].items()} for name in names]
    reserved = {*state.tensors}
    try:
        program = torch.onnx.export(
            Functional(),
            (list(inputs.values()), tensors),
            input_names=[*(claimed(name, reserved) for name in names), *state.tensors],
            output_names=[claimed(name, reserved) for name in outputs],
            dynamic_shapes=(shapes, [None] * len(tensors)),
            opset_version=opset,
            dynamo=True,
            verbose=False,
        )
    except torch_forms.MODULE_ERRORS as cause:
        root: BaseException = cause
        while root.__cause__ is not None:
            root = root.__cause__
        raise TrainingError(
            f"PyTorch cannot export the module: {one_line(root)[:300]}; try torch.onnx.export by itself, and use"
            " `dynamic` to name the dimensions that vary"
        ) from cause
    return program


def _check_outputs(model: Model, inputs: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raise TrainingError if the exported model and the module differ in their outputs for the example."""
    graph = model.proto.graph
    if len(graph.input) != len(inputs) or len(graph.output) != len(expected):
        return
    example = {v.name: tensor.detach().cpu().numpy() for v, tensor in zip(graph.input, inputs.values(), strict=True)}
    try:
        outputs = Runner.open(model, SessionOptions(optimized=False, planned=False)).run(example)
    except AmpRewriteError:  # a training step reports the reason
        return
    for (name, output), tensor in zip(outputs.items(), expected.values(), strict=True):
        ours, theirs = np.asarray(output), tensor.detach().cpu().numpy()
        if theirs.dtype.kind != "f" or not theirs.size:
            continue
        largest = np.abs(theirs[np.isfinite(theirs)]).max(initial=0)
        if not np.allclose(ours, theirs, rtol=_MAX_DIFFERENCE, atol=_MAX_DIFFERENCE * largest + 1e-6, equal_nan=True):
            difference = np.nanmax(np.abs(ours - theirs))
            raise TrainingError(
                f"the exported model does not match the module: on the example, {name!r} differs by"
                f" {difference:.2g}, and its largest value is {largest:.2g}; replace the wrongly exported part, or, if"
                " the example is a borderline case (equal scores, rounding), pass another example"
            )


_MAX_DIFFERENCE = 1e-3
"""Maximum relative difference between the outputs of a module and of its export."""
