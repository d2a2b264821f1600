"""`auto_convert_mixed_precision` of onnxconverter-common, for models and for files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from onnx import ModelProto

from amp_rewrite.compat.float16 import io_rules, without_effect
from amp_rewrite.evidence.data.feed import Feed
from amp_rewrite.evidence.metric import differences
from amp_rewrite.files.casting import Array
from amp_rewrite.files.model import Model, ModelSource
from amp_rewrite.pipeline.conversion import Converted, Draft, finish
from amp_rewrite.pipeline.measured import calibrated, shifted_and_guarded
from amp_rewrite.pipeline.repair import minimal_set, regions_of, repair
from amp_rewrite.reports.evidence import ALLCLOSE, Criterion
from amp_rewrite.rewrite.emulate import emulate
from amp_rewrite.runtime.installation import require
from amp_rewrite.runtime.runner import Runner
from amp_rewrite.settings.choices import HEADROOM
from amp_rewrite.settings.request import Request

Validate = Callable[[Sequence[Any], Sequence[Any]], bool]


def auto_convert_mixed_precision(
    model: ModelSource,
    feed_dict: Mapping[str, Array],
    validate_fn: Validate | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    keep_io_types: bool = False,
) -> ModelProto:
    """Convert a model to float16, keeping only as many ops in float32 as its outputs on one batch require.

    The arguments are those of onnxconverter-common's function of this name. With only tolerances, it calls
    `amp_rewrite.repair`, which also accepts many batches and returns a report and a verdict. Trials run on the CPU with
    float16's rounding; values whose range exceeds float16 stay float32 in any case.

    Args:
        model: a ModelProto, a path, or anything else that `convert` accepts; it is never changed.
        feed_dict: one batch, arrays by input name.
        validate_fn: called with the outputs of the float32 model and those of a trial, both lists of arrays in the
            order of the model; returns True if the trial is close enough.
        rtol: bound |a - b| <= atol + rtol |a| on every element; 1e-5 if only `atol` is given.
        atol: see `rtol`; 1e-8 if only `rtol` is given.
        keep_io_types: True keeps float32 inputs and outputs, False makes them float16.

    Returns:
        The converted model, completely in memory.

    Raises:
        TypeError: an argument is unknown.
        ValueError: neither `validate_fn` nor a tolerance is given, `validate_fn` rejects the float32 model's own
            outputs, or no choice of ops is close enough.
        AmpRewriteError: `convert` or `calibrate` raises it.

    Example:
        >>> import numpy as np
        >>> from amp_rewrite.compat import auto_convert_mixed_precision
        >>> batch = {"pixels": np.zeros((1, 64), np.float32)}
        >>> half = auto_convert_mixed_precision("model.onnx", batch, rtol=1e-2, atol=1e-3, keep_io_types=True)
    """
    if validate_fn is None and rtol is None and atol is None:
        raise ValueError("there is no criterion for the outputs; pass validate_fn, rtol or atol")
    bounds = {"rtol": 1e-5 if rtol is None else rtol, "atol": 1e-8 if atol is None else atol}
    bounded = rtol is not None or atol is not None

    def is_close(expected: Sequence[Any], outputs: Sequence[Any]) -> bool:
        if validate_fn is None or not validate_fn(expected, outputs):
            return False
        pairs, by = zip(expected, outputs, strict=True), Criterion(ALLCLOSE, **bounds)
        results = (difference for a, b in pairs for _, difference in differences(a, b, by))
        return not bounded or all(difference.ok for difference in results)

    return _convert(model, feed_dict, validate_fn and is_close, bounds, keep_io_types).model


def auto_convert_mixed_precision_model_path(
    source_model_path: str | PathLike[str],
    input_feed: Mapping[str, Array],
    target_model_path: str | PathLike[str],
    provider: str | Sequence[str],
    location: str | None = None,
    customized_validate_func: Validate | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    keep_io_types: bool = True,
    verbose: bool = False,
) -> None:
    """Convert a file as onnxconverter-common does, keeping only as many ops in float32 as one batch requires.

    Models may have any size: weights are streamed to a separate file next to the result. Nothing is written before the
    search has ended, and no other file is left in the folder.

    Args:
        source_model_path: the file, with any external data in the same folder.
        input_feed: one batch, arrays by input name.
        target_model_path: the file to write, replaced if it exists; its folder is created.
        provider: no effect; trials run on the CPU with float16's rounding. UserWarning for another provider.
        location: the name of the weight file in the same folder; "fp16_tensor.data" by default.
        customized_validate_func: like `validate_fn` of `auto_convert_mixed_precision`; it replaces the tolerances.
        rtol: bound |a - b| <= atol + rtol |a| on every element; 1e-3 by default.
        atol: see `rtol`; 1e-5 by default.
        keep_io_types: True keeps float32 inputs and outputs, False makes them float16.
        verbose: no effect, with a UserWarning.

    Raises:
        TypeError: an argument is unknown.
        ValueError: no choice of ops is close enough, or `customized_validate_func` rejects the float32 model's own
            outputs.
        AmpRewriteError: `convert`, `calibrate` or `save` raises it.

    Example:
        >>> import numpy as np
        >>> from amp_rewrite.compat import auto_convert_mixed_precision_model_path
        >>> batch = {"pixels": np.zeros((1, 64), np.float32)}
        >>> where = "model.onnx", batch, "out/half.onnx", ["CPUExecutionProvider"]
        >>> auto_convert_mixed_precision_model_path(*where, rtol=1e-2, atol=1e-3)
    """
    other_provider = provider if provider not in (_CPU, [_CPU], (_CPU,)) else None
    without_effect(provider=other_provider, verbose=verbose)
    source, target = fspath(source_model_path), Path(target_model_path)
    bounds = {"rtol": 1e-3 if rtol is None else rtol, "atol": 1e-5 if atol is None else atol}
    converted = _convert(source, input_feed, customized_validate_func, bounds, keep_io_types)
    target.parent.mkdir(parents=True, exist_ok=True)
    converted.save(target, overwrite=True, external_data=location or "fp16_tensor.data")


_CPU = "CPUExecutionProvider"
_UNSOLVED = (
    "validation failed: even with every op in float32 the outputs are not close enough; the bounds are tighter than"
    " float16 inputs and outputs allow (keep_io_types=True keeps them float32), or than float32 itself reaches"
)


def _convert(
    model: ModelSource, batch: Mapping[str, Array], accept: Validate | None, bounds: Mapping[str, Any], keep_io: bool
) -> Converted:
    """Return a conversion accepted by `accept`, or, if it is None, one within the bounds; ValueError on failure."""
    io, _ = io_rules(keep_io)
    if accept is None:
        repaired = repair(model, dict(batch), **bounds, io=io)
        if not repaired.solved:
            raise ValueError(_UNSOLVED)
        return repaired.converted
    require("a conversion with data")
    draft = Draft.of(model, Request.of(io=io, fuse="basic"))
    expected = _outputs(draft.source, batch)
    if not accept(expected, expected):
        raise ValueError("validation failed for the float32 model itself; fix validate_fn, or loosen its bounds")
    ranges = calibrated(draft, Feed.of(dict(batch), draft.source))
    draft = shifted_and_guarded(draft, ranges, HEADROOM)
    regions = regions_of(draft, draft.paint(), {})

    def trial(pinned: frozenset[int]) -> Converted:
        pins = [pin for number in sorted(pinned) for pin in regions[number].pins]
        return finish(draft, draft.paint(pins))

    chosen = minimal_set(len(regions), lambda pinned: accept(expected, _outputs(emulate(trial(pinned).result), batch)))
    if chosen is None:
        raise ValueError(_UNSOLVED)
    return trial(frozenset(chosen))


def _outputs(model: Model, batch: Mapping[str, Array]) -> list[Any]:
    (inputs,) = Feed.of(dict(batch), model)
    return list(Runner.open(model).run(inputs).values())
