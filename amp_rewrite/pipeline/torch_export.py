"""Export of a PyTorch module to a converted file, in one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Unpack

from amp_rewrite.errors import FeedError, MachineError, ModelError
from amp_rewrite.evidence.data.feed import Feed
from amp_rewrite.files.model import Model
from amp_rewrite.files.store import check_target
from amp_rewrite.pipeline.convert import convert
from amp_rewrite.pipeline.repair import repair
from amp_rewrite.reports.evidence import ARGUMENTS, FAILED
from amp_rewrite.reports.report import Report
from amp_rewrite.settings.option import OptionsAndCriterion, checked, takes
from amp_rewrite.settings.request import CRITERION, KEYWORDS


@takes(KEYWORDS, CRITERION)
@checked
def export(
    module: Any,
    args: Any,
    path: str | Path,
    *,
    dynamic_shapes: Sequence[Any] | Mapping[str, Any] | None = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    check: bool = True,
    overwrite: bool = False,
    **options: Unpack[OptionsAndCriterion],
) -> Report:
    """Export a PyTorch module to ONNX, convert it, check it on its arguments, and write the file.

    The module is exported in evaluation mode by `torch.onnx.export(…, dynamo=True)`. The check is the one that
    `convert` makes, with `args` in place of a random batch. If a criterion is given, `repair` runs instead, with `args`
    as its data.

    Args:
        module: a `torch.nn.Module`; its mode is restored.
        args: its arguments, as a tuple or a single tensor.
        path: the file to write.
        dynamic_shapes: passed to `torch.onnx.export`, for example `({0: torch.export.Dim("batch")},)`.
        input_names: names for the inputs in the file.
        output_names: names for the outputs in the file.
        check: False to convert without a check.
        overwrite: True to replace an existing file.
        **options: those of `convert`, see docs/reference/options.md, and the criterion of `verify`.

    Returns:
        The report of the conversion.

    Raises:
        MachineError: PyTorch or onnxscript is not installed.
        ModelError: `module` is not a module, or the check fails; nothing is written.
        FeedError: the arguments are neither a tensor nor a tuple.
        AmpRewriteError: `convert` or `Converted.save` raises it.

    Example:
        >>> import torch, amp_rewrite
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
        >>> report = amp_rewrite.export(net, torch.ones(2, 4), "net_fp16.onnx")
    """
    inputs = _arguments(module, args)
    import torch

    check_target(Path(path), overwrite)  # fail early
    names: Mapping[str, Any] = {"input_names": input_names, "output_names": output_names}
    training = module.training
    try:
        program = torch.onnx.export(
            module.eval(), inputs, dynamo=True, verbose=False, dynamic_shapes=dynamic_shapes, **names
        )
    finally:
        module.train(training)
    program.model.graph.name = type(module).__name__  # shown in reports; torch always writes "main_graph"
    source = Model.load(program)
    arrays = tuple(value for value in inputs if hasattr(value, "__array__"))
    if any(value is not None for name, value in options.items() if name in CRITERION):
        converted = repair(source, arrays, **options).converted
    else:
        keywords: Mapping[str, Any] = options
        converted = convert(source, check=check and _batch(source, arrays), **keywords)
    evidence = converted.report.evidence
    if evidence.level == FAILED:
        ways = "pass a tolerance to repair it, or check=False to write it anyway"
        raise ModelError(f"the conversion fails its check: {evidence.objection}; nothing was written; {ways}")
    converted.save(path, overwrite=overwrite)
    return converted.report


def _batch(source: Model, arrays: Sequence[object]) -> Feed | bool:
    """Return the arguments as a batch; True, for a random batch, if they do not match the inputs of the model."""
    try:
        return replace(Feed.of(tuple(arrays), source), origin=ARGUMENTS)
    except FeedError:
        return True


def _arguments(module: Any, args: Any) -> tuple[Any, ...]:
    missing = [name for name in ("torch", "onnxscript") if find_spec(name) is None]
    if missing:
        raise MachineError(f"export requires {' and '.join(missing)}; pip install {' '.join(missing)}")
    import torch

    if not isinstance(module, torch.nn.Module):
        raise ModelError(f"module must be a torch.nn.Module, not {type(module).__name__}; load weights into a module")
    if not isinstance(args, (torch.Tensor, tuple, list)):
        raise FeedError(f"args must be tensors, not {type(args).__name__}; convert them with torch.as_tensor")
    return (args,) if isinstance(args, torch.Tensor) else tuple(args)
