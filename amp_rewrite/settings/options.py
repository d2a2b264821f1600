"""The options of a conversion, in one table.

A row of `OPTIONS` is all that an option needs: it makes the keyword of `convert`, the key of a settings file and of
`--set`, the option of the command line if it has one, the environment variable, the entry in report and metadata, and a
row of docs/reference/options.md. `signatures.py` lists the keywords once more, with their types for static checkers.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import PolicyError, spelled
from amp_rewrite.ir.names import as_names
from amp_rewrite.settings.choices import (
    Fuse,
    Level,
    Placement,
    Quantized,
    Safety,
    Target,
    check_headroom,
    parse_opset,
    parse_shift,
)
from amp_rewrite.settings.criterion import CRITERION
from amp_rewrite.settings.option import ADVANCED, DATA, MANY, OUTPUT, Kind, Option, Stated, Values
from amp_rewrite.settings.policy import low_type

if TYPE_CHECKING:
    from amp_rewrite.settings.op_lists import OpLists

ListSource = str | Path | Mapping[str, object]


def _overlays(value: Sequence[ListSource] | ListSource) -> Sequence[ListSource]:
    kinds = (str, os.PathLike, Mapping)
    overlays = [value] if isinstance(value, kinds) else value
    if not isinstance(overlays, Collection) or not all(isinstance(overlay, kinds) for overlay in overlays):
        words = "give the path of a YAML file, a mapping or a shipped name, or a list of these"
        raise PolicyError(f"{spelled('lists', value)} is {type(value).__name__}; {words}")
    return list(overlays)


def _op_lists(overlays: Sequence[ListSource], values: Values) -> OpLists:
    from amp_rewrite.settings.op_lists import environment_edits, load_lists  # late: help and settings need no lists

    return load_lists(values["to"], overlays, environment_edits(os.environ))


def _runnable(fuse: Fuse, values: Values) -> Fuse:
    """Return the fusions for the target; PolicyError for operators that it cannot run."""
    target = values["target"]
    if fuse is Fuse.CONTRIB and target.family is not Target.ORT_CUDA:
        raise PolicyError(
            f"fuse 'contrib' makes operators that only onnxruntime has, and the target is {target.value!r}; use target"
            " 'ort-cuda', or fuse 'basic'"
        )
    return fuse.on(target)


def _served(target: Target, values: Values) -> Target:
    """Return the target, of the installed onnxruntime if it states no release; PolicyError for a type that it lacks."""
    if target is Target.WEBGPU and values["to"] is DType.BFLOAT16:
        raise PolicyError("target 'webgpu' has no bfloat16: WebGPU's shaders know float32 and float16; use float16")
    limits = target.limits
    if limits is not None and values["to"] not in limits.low:
        known = " and ".join(sorted(dtype.spelling for dtype in limits.low))
        raise PolicyError(
            f"{limits.runtime} does not compute in {values['to'].spelling}, only in {known}; use {spelled('to', known)}"
        )
    if target is not Target.ORT_CUDA:
        return target
    from amp_rewrite.runtime.releases import installed_release, known_release  # late: help needs no package metadata

    installed = installed_release()
    return target if installed in ("", known_release("")) else Target.parse(f"{target.value}:{installed}")


def _shard_size(size: str | int) -> str | int:
    from amp_rewrite.files.layout import shard_bytes  # late: few models are split

    shard_bytes(size)
    return size


def _placed(value: Placement | None, values: Values) -> Placement:
    """Return the placement; by default "mincut", and "propagate" where TensorFlow's rules alone hold."""
    return value or (Placement.MINCUT if values["safety"] is Safety.DEFAULT else Placement.PROPAGATE)


OPTIONS: tuple[Option, ...] = (
    Option(
        name="to",
        metavar="float16|bfloat16|POLICY",
        help="The low type.  [default: float16]",
        doc='the type to lower to: "float16" (or "fp16", "half"), "bfloat16" ("bf16") or a policy such as'
        ' "mixed_float16"; in Python also a type of numpy, ml_dtypes, torch or onnx, such as `np.float16`',
        default="float16",
        parse=low_type,
    ),
    Option(
        name="lists",
        kind=Kind.LIST,
        metavar="FILE|NAME",
        help="Op lists on top of the default ones.",
        doc="op lists on top of the default ones: YAML files, mappings (in Python) or shipped names",
        default=(),
        parse=_overlays,
        combine=_op_lists,
        environment="AMP_REWRITE_LISTS",
    ),
    Option(
        name="level",
        metavar="|".join(level.value for level in Level),
        doc='how far to go, by TensorFlow\'s names or "lower-all" (`Level`)',
        usual="default",
        parse=Level.parse,
        stated=Stated.ALWAYS,
        environment="AMP_REWRITE_LEVEL",
    ),
    Option(
        name="target",
        group=ADVANCED,
        metavar="ort-cuda[:RELEASE]|onnx|tensorrt[:RELEASE]|directml|openvino|coreml|qnn|webgpu|FILE",
        help="Runtime of the result.  [default: ort-cuda]",
        doc='the runtime of the result: "ort-cuda" (or "cuda", "gpu"; "ort-cuda:1.22" for a release of onnxruntime, by'
        ' default the installed one), "onnx", "tensorrt" (or "trt", "tensorrt:11.2"), "directml", "openvino", "coreml",'
        ' "qnn", "webgpu", or a file of kernels that `amp-rewrite doctor --dump-kernels` wrote; see'
        " [targets](targets.md) (`Target`)",
        default="ort-cuda",
        parse=Target.parse,
        combine=_served,
        stated=Stated.ALWAYS,
    ),
    Option(
        name="safety",
        metavar="default|none",
        doc='"none" turns off every rule that protects numbers besides TensorFlow\'s own',
        default="default",
        parse=Safety.parse,
        stated=Stated.ALWAYS,
    ),
    Option(
        name="keep",
        kind=Kind.LIST,
        metavar="PATTERN",
        help="Ops that stay float32, as in op=Softmax.",
        doc="patterns of ops that stay float32, or are raised to it, such as `op=Softmax`",
        default=(),
        combine=lambda value, _: as_names(value),
    ),
    Option(
        name="lower",
        kind=Kind.LIST,
        metavar="PATTERN",
        help="Ops to lower, whatever the lists say.",
        doc="patterns of ops to lower, whatever the lists say",
        default=(),
        combine=lambda value, _: as_names(value),
    ),
    Option(
        name="io",
        kind=Kind.LIST,
        metavar="keep|low|GLOB=TYPE",
        help="Types of inputs and outputs.",
        doc='types of inputs and outputs: "keep", "low" or globs such as "past_*=float16"',
    ),
    Option(
        name="kv",
        metavar="TYPE",
        doc="type of key-value caches: the inputs and outputs that optimum, onnxruntime-genai and transformers.js name"
        " `past_key_values.0.key`, `present.0.key` and alike; `io` wins over it",
        parse=DType.parse,
    ),
    Option(
        name="gray_follows_allow",
        kind=Kind.SWITCH,
        doc="True lowers a gray op right after an allow op; None does so for bfloat16 only",
    ),
    Option(
        name="quantized",
        metavar="keep|rescale",
        doc='"keep" leaves ops between DequantizeLinear and QuantizeLinear as they are, which runtimes run on integers;'
        ' "rescale" gives quantizers scales of the low type from opset 19 on, and the ops between them that type',
        default="keep",
        parse=Quantized.parse,
        stated=Stated.UNUSUAL,
    ),
    Option(
        name="fuse",
        group=ADVANCED,
        metavar="auto|none|basic|contrib",
        help="Fuse ops, also into onnxruntime's own.  [default: auto]",
        doc='"basic" brings what is written out op by op into standard form first, and folds BatchNormalization; "none"'
        ' does not; "contrib" makes operators of onnxruntime as well, for the target ort-cuda alone; "auto" is'
        ' "contrib" for that target, and "basic" for all others',
        default="auto",
        parse=Fuse.parse,
        combine=_runnable,
        stated=Stated.UNUSUAL,
    ),
    Option(
        name="opset",
        group=ADVANCED,
        metavar="auto|keep|N",
        help="Opset of the result.  [default: 13 and up]",
        doc='the opset of the result: "auto" for the one that the target serves best, "keep" for the model\'s own; by'
        " default its own from 13 on, and of an older model the first from 13 on at which the target has most kernels;"
        " see [the opset](../concepts/fusion.md#the-opset)",
        parse=parse_opset,
        stated=Stated.UNUSUAL,
        integers=True,
    ),
    Option(
        name="shift",
        metavar="auto|none|K",
        doc="regions of values that go beyond float16 by `data` or `ranges` are computed times 2⁻ᵏ, which changes no"
        ' digit: "auto" takes the smallest k with headroom, a number that k, also without data for residual streams;'
        ' "none" keeps them float32; see [range shifting](../concepts/shift.md)',
        default="auto",
        parse=parse_shift,
        stated=Stated.UNUSUAL,
        integers=True,
    ),
    Option(
        name="placement",
        group=ADVANCED,
        metavar="mincut|propagate",
        doc='"propagate" spreads colors as TensorFlow does; "mincut" then moves the border between the types to where'
        ' Casts cost least (`Placement`); by default "mincut", without safety rules "propagate"',
        parse=Placement.parse,
        combine=_placed,
        stated=Stated.UNUSUAL,
    ),
    Option(
        name="external_data",
        kind=Kind.SWITCH,
        group=OUTPUT,
        doc="weights in a file of their own; by default above 1.5 GB; in Python an argument of `save`",
        keyword=False,
    ),
    Option(
        name="shard_size",
        group=OUTPUT,
        metavar="5GB|source",
        doc="the largest size of a file of weights, or `source` to split them as in the source; in Python an argument"
        " of `save`",
        keyword=False,
        parse=_shard_size,
        integers=True,
    ),
    Option(
        name="overwrite",
        kind=Kind.SWITCH,
        group=OUTPUT,
        help="Replace an existing output.",
        doc="replace an existing output; in Python an argument of `save`",
        default=False,
        keyword=False,
    ),
    Option(
        name="fail_on",
        kind=Kind.LIST,
        group=OUTPUT,
        metavar="KIND,…",
        help="Exit with 1 only for these: lowered, raised, retyped, attribute, added, removed, casts;"
        " float32 stands for raised, and for added in float32.  [default: all]",
        doc="differences for which `amp-rewrite diff` exits with 1; by default all. `float32` stands for ops that are"
        " raised, or added in float32",
        keyword=False,
        separator=",",
    ),
    Option(
        name="ranges",
        kind=Kind.PATH,
        group=DATA,
        metavar="FILE",
        help="Keep in float32 what does not fit by these ranges.",
        doc="ranges that `calibrate` measured, for `convert` and `repair`; an op that reads or makes a value that does"
        " not fit stays float32",
        keyword=False,
    ),
    Option(
        name="headroom",
        kind=Kind.NUMBER,
        group=DATA,
        metavar="X",
        doc="the factor by which measured values must fit the type, for `convert` and `repair`; by default 2",
        keyword=False,
        parse=lambda text: check_headroom(float(text)),
    ),
    Option(
        name="data",
        kind=Kind.PATH,
        group=DATA,
        metavar="FILE|FOLDER",
        help="Input data: .npz, .npy, or a folder of them.",
        doc="input data of commands that run a model: a .npz file, a .npy file, or a folder of them",
        keyword=False,
    ),
    Option(
        name="batches",
        kind=Kind.WHOLE,
        group=DATA,
        doc="the number of random batches, by default 1; in Python an argument of `Feed.randomly`, as the next three",
        keyword=False,
    ),
    Option(
        name="seed",
        kind=Kind.WHOLE,
        group=DATA,
        doc="the seed of random batches; by default 0",
        keyword=False,
    ),
    Option(
        name="int_range",
        kind=Kind.LIST,
        group=DATA,
        metavar="NAME=0,100",
        doc="integers for an input of random batches, as in `ids=0,100` for 0 to 99; by default 0 and 1",
        keyword=False,
    ),
    Option(
        name="allow_nonfinite",
        kind=Kind.SWITCH,
        group=DATA,
        doc="data may hold NaN and infinity",
        keyword=False,
    ),
    Option(
        name="feedback",
        kind=Kind.LIST,
        group=DATA,
        metavar="OUT=IN",
        help="An output that is this input of the next run, as in hn=h or present.*=past.*; repeatable.",
        doc="outputs that are inputs of the next run, as in `hn=h` or `present.*=past_key_values.*`, for `verify`,"
        " `calibrate` and conversions with data; `convert` takes the key alone; in Python an argument of `Feed.of`,"
        " `verify`, `calibrate` and `repair`, as the next one",
        keyword=False,
    ),
    Option(
        name="steps",
        kind=Kind.WHOLE,
        group=DATA,
        metavar="N",
        help="With --feedback: run each batch N times in a row.  [default: batches are the steps of one sequence]",
        doc="with feedback, the number of runs on each batch, which then starts a sequence of its own; by default all"
        " batches are the steps of one sequence",
        keyword=False,
    ),
    *(row for row in CRITERION.values() if row.setting),
    Option(
        name="budget",
        kind=Kind.WHOLE,
        group=DATA,
        doc="the most trials of a repair, by default 100; in Python an argument of `repair`",
        keyword=False,
    ),
    Option(
        name="name",
        group=MANY,
        metavar="RULE",
        doc="names of results, as in `{stem}_fp16.onnx`, by default `{stem}.onnx`; in Python an argument of"
        " `convert_many`, as the next two",
        keyword=False,
    ),
    Option(
        name="include",
        kind=Kind.LIST,
        group=MANY,
        metavar="GLOB",
        doc="files to take, by name or, with a /, by path",
        keyword=False,
    ),
    Option(
        name="exclude",
        kind=Kind.LIST,
        group=MANY,
        metavar="GLOB",
        doc="files and folders to leave out, likewise",
        keyword=False,
    ),
    Option(
        name="log_path",
        kind=Kind.PATH,
        group=OUTPUT,
        doc="folder for reports of the model before and after the conversion, and for the four lists as text",
        keyword=False,
        setting=False,
        environment="AMP_REWRITE_LOG_PATH",
    ),
)
"""Every option, in the order in which people read them. Report and metadata state them in this order, too."""

KEYWORDS = {option.name: option for option in OPTIONS if option.keyword}
SETTINGS = {option.name: option for option in OPTIONS if option.setting}
STATED = tuple(option.name for option in OPTIONS if option.stated)
"""Options that the header of a report may state."""


def from_environment(environ: Mapping[str, str]) -> Mapping[str, object]:
    """Return values from environment variables; lists are separated as PATH is. ConfigError for an illegal value."""
    stated: dict[str, object] = {}
    for option in OPTIONS:
        if option.environment and (text := environ.get(option.environment)):
            words = tuple(filter(None, text.split(os.pathsep)))
            stated[option.name] = option.check(words if option.kind is Kind.LIST else text, option.environment)
    return stated
