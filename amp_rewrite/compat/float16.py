"""`convert_float_to_float16` with the signatures of other converters."""

from __future__ import annotations

import glob
import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from os import PathLike

from onnx import ModelProto

from amp_rewrite.errors import PolicyError
from amp_rewrite.evidence.opening import low_types
from amp_rewrite.files.model import Model, ModelSource
from amp_rewrite.ir.names import as_names
from amp_rewrite.pipeline.convert import convert
from amp_rewrite.settings.selectors import allow_unmatched

_PLAIN = re.compile(r"[\w/.]+")


def without_effect(**arguments: object) -> None:
    """Warn about each argument without effect, unless it is None or False."""
    for name, value in arguments.items():
        if value is not None and value is not False:
            text = f"{name}={value!r} has no effect; docs/how-to/migrating.md describes the alternatives"
            warnings.warn(text, UserWarning, stacklevel=3)  # the caller's line


def node_pattern(name: str) -> str:
    """Return the pattern for nodes with exactly this name."""
    return name if _PLAIN.fullmatch(name) else rf"re:\A{re.escape(name)}\Z"


def op_patterns(op_type: str) -> tuple[str, str]:
    """Return patterns for an op type in ai.onnx and in all other domains, since other converters ignore domains."""
    escaped = glob.escape(op_type).replace(",", r"\,")
    return f"op={escaped}", f"op=*::{escaped}"


DEFAULT_OP_BLOCK_LIST: list[str] = []
"""An empty list for projects that write `DEFAULT_OP_BLOCK_LIST + ["Softmax"]`: the op lists of this package always
apply, and `op_block_list` adds to them."""


def convert_float_to_float16(
    model: ModelSource,
    min_positive_val: float | None = None,
    max_finite_val: float | None = None,
    keep_io_types: bool | Sequence[str] = False,
    disable_shape_infer: bool = False,
    op_block_list: Collection[str] | None = None,
    node_block_list: Collection[str] | None = None,
    *,
    check_fp16_ready: bool | None = None,
    force_fp16_initializers: bool = False,
    force_fp16_inputs: Mapping[str, Sequence[int]] | None = None,
    use_bfloat16_as_blocked_nodes_dtype: bool = False,
) -> ModelProto:
    """Convert a model to float16, with the arguments of the same function in onnxconverter-common and onnxruntime.

    The conversion is the same as in `amp_rewrite.convert`: op lists, safety rules and a minimum cut decide, and the
    arguments add to them. UserWarning for an argument without effect.

    Args:
        model: a ModelProto, a path, or anything else that `convert` accepts; it is never changed.
        min_positive_val: no effect; constants are rounded, not raised.
        max_finite_val: no effect; constants are not clamped.
        keep_io_types: True keeps float32 inputs and outputs; a list keeps only those in it; False makes all float16.
        disable_shape_infer: accepted; ONNX's shape inference never runs, since types come from the schemas.
        op_block_list: op types, in any domain, that stay float32 in addition to those on the shipped lists.
        node_block_list: names of nodes that stay float32; UserWarning for a name that is not in the model.
        check_fp16_ready: True rejects a model that already contains float16; otherwise its float32 part is converted.
        force_fp16_initializers: no effect; a weight has the type of its readers.
        force_fp16_inputs: no effect; schema and kernels decide.
        use_bfloat16_as_blocked_nodes_dtype: no effect; blocked ops stay float32.

    Returns:
        The converted model, completely in memory.

    Raises:
        TypeError: an argument is unknown.
        PolicyError: `check_fp16_ready` is True and the model contains a low type; also a ValueError.
        ModelError: the model is invalid, or larger than 2 GB; `amp_rewrite.convert(…).save` has no such limit.

    Example:
        >>> from amp_rewrite.compat import convert_float_to_float16
        >>> half = convert_float_to_float16("model.onnx", keep_io_types=True, op_block_list=["Softmax"])
    """
    without_effect(
        min_positive_val=min_positive_val,
        max_finite_val=max_finite_val,
        force_fp16_initializers=force_fp16_initializers,
        force_fp16_inputs=force_fp16_inputs,
        use_bfloat16_as_blocked_nodes_dtype=use_bfloat16_as_blocked_nodes_dtype,
    )
    if check_fp16_ready and (low := low_types(Model.load(model))):
        raise PolicyError(
            f"the model already contains {', '.join(low)}, which check_fp16_ready=True rejects; leave it out to convert"
            " the float32 part"
        )
    nodes = {node_pattern(name): f"node {name!r} of node_block_list" for name in as_names(node_block_list) if name}
    ops = [pattern for op_type in as_names(op_block_list) for pattern in op_patterns(op_type)]
    io, kept = io_rules(keep_io_types)
    with allow_unmatched() as unmatched:
        converted = convert(model, io=io, keep=[*nodes, *ops], fuse="basic")
    for pattern, what in {**nodes, **kept}.items():
        if pattern in unmatched:
            warnings.warn(f"{what} is not in the model, so it has no effect", UserWarning, stacklevel=2)
    return converted.model


def convert_float_to_float16_model_path(
    model_path: str | PathLike[str],
    min_positive_val: float | None = None,
    max_finite_val: float | None = None,
    keep_io_types: bool = False,
) -> ModelProto:
    """Convert a file as onnxconverter-common's function of this name does; see `convert_float_to_float16`.

    Args:
        model_path: the file, with any external data in the same folder.
        min_positive_val: no effect, with a UserWarning.
        max_finite_val: no effect, with a UserWarning.
        keep_io_types: see `convert_float_to_float16`.

    Returns:
        The converted model, completely in memory.

    Raises:
        TypeError: an argument is unknown.
        ModelError: the file cannot be read, or the model is larger than 2 GB.

    Example:
        >>> from amp_rewrite.compat import convert_float_to_float16_model_path
        >>> half = convert_float_to_float16_model_path("model.onnx", keep_io_types=True)
    """
    without_effect(min_positive_val=min_positive_val, max_finite_val=max_finite_val)
    return convert(str(model_path), io=io_rules(keep_io_types)[0], fuse="basic").model


def io_rules(keep_io_types: bool | Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the `io` rules for `keep_io_types`, and a description of each rule that may have no match."""
    if isinstance(keep_io_types, bool):
        return ["keep" if keep_io_types else "low"], {}
    kept = {f"{glob.escape(name)}=float32": f"{name!r} of keep_io_types" for name in as_names(keep_io_types)}
    return ["low", *kept], kept
