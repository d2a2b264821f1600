"""The options of a run, as fields of one dataclass.

A field of `Request` defines everything about an option: the keyword of `convert`, the key in settings files and in
`--set`, the command-line option (if any), the environment variable, the entry in report and metadata, and the section
in docs/reference/options.md. Each keyword of `convert` is also in `Options`, with its type for callers.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Unpack, cast

from amp_rewrite.dtypes import DType
from amp_rewrite.errors import PolicyError, spelled
from amp_rewrite.ir.names import as_names
from amp_rewrite.settings.choices import (
    Assumption,
    Fuse,
    Level,
    Opset,
    Placement,
    Quantized,
    Safety,
    Shift,
    Target,
    check_headroom,
    installed,
    low_type,
    parse_opset,
    parse_shift,
)
from amp_rewrite.settings.option import (
    ALWAYS,
    IF_CHANGED,
    PRECISION,
    CriterionKeywords,
    Kind,
    ListSource,
    Options,
    Painting,
    Progress,
    check_keyword_names,
    data_option,
    field_options,
    option,
    output_option,
)

if TYPE_CHECKING:
    from amp_rewrite.settings.op_lists import OpLists


USUAL_TOLERANCES = {"float16": "1e-2", "bfloat16": "8e-2"}
"""The recommended first tolerance by low type."""
STARTS = ", ".join(f"{tolerance} for {low}" for low, tolerance in USUAL_TOLERANCES.items())


def _overlays(value: Sequence[ListSource] | ListSource) -> tuple[ListSource, ...]:
    kinds = (str, os.PathLike, Mapping)
    overlays = [value] if isinstance(value, kinds) else value
    if not isinstance(overlays, Collection) or not all(isinstance(overlay, kinds) for overlay in overlays):
        legal = "the path of a YAML file, a mapping, a shipped name, or a list of these"
        raise PolicyError(f"{spelled('lists', value)} must be {legal}, not {type(value).__name__}")
    return tuple(overlays)


def _kinds(words: str | Sequence[str]) -> tuple[str, ...]:
    return tuple(filter(None, ",".join(as_names(words)).split(",")))


@dataclass(frozen=True, kw_only=True)
class Request:
    """The parsed and checked options of a run.

    `of` accepts the keywords of `convert`. The other options are for commands that run, compare or write models. Four
    fields are not options: `config` is a text with the settings from a file and the name of the file; `found` contains
    the patterns that a check added to `keep`; `drawn` contains the keywords of `Feed.randomly` for a check without
    data; and `progress` is called with the stages of the work.
    """

    to: DType = option(
        "float16",
        'the low type: "float16" (or "fp16", "half"), "bfloat16" ("bf16") or a policy, for example "mixed_float16"; in'
        " Python, also a numpy, ml_dtypes, torch or onnx type, for example `np.float16`",
        metavar="float16|bfloat16|POLICY",
        help="The low type: float16 or bfloat16.  [default: float16]",
        parse=low_type,
    )
    lists: tuple[ListSource, ...] = option(
        (),
        "op lists on top of the default lists: YAML files, mappings (in Python) or names of built-in lists",
        metavar="FILE|NAME",
        help="Op lists to apply on top of the default lists.",
        parse=_overlays,
        environment="AMP_REWRITE_LISTS",
    )
    level: Level = option(
        "default",
        'the extent of the conversion: one of TensorFlow\'s levels, or "lower-all"',
        recorded=ALWAYS,
        environment="AMP_REWRITE_LEVEL",
    )
    target: Target = option(
        "ort-cuda",
        'the runtime of the result: "ort-cuda" (or "cuda", "gpu"; "ort-cuda:1.22" for a release of onnxruntime, by'
        ' default the installed one), "onnx", "tensorrt" (or "trt", "tensorrt:11.2"), "directml", "openvino", "coreml",'
        ' "qnn" or "webgpu"; see'
        " [targets](targets.md) (`Target`)",
        metavar="ort-cuda[:RELEASE]|onnx|tensorrt[:RELEASE]|directml|openvino|coreml|qnn|webgpu",
        help="The runtime: ort-cuda, onnx, tensorrt, webgpu …",
        parse=Target.parse,
        recorded=ALWAYS,
    )
    safety: Safety = option(
        "default",
        '"none" turns off all safety rules and `placement`; only TensorFlow\'s rules remain',
        recorded=ALWAYS,
    )
    keep: tuple[str, ...] = option(
        (),
        "patterns of ops to keep in float32, or to raise to it, for example `op=Softmax`",
        metavar="PATTERN",
        help="Ops that stay in float32: a name, or op=Softmax.",
    )
    lower: tuple[str, ...] = option(
        (),
        "patterns of ops to lower, regardless of the lists",
        metavar="PATTERN",
        help="Ops to lower, regardless of the lists.",
    )
    io: tuple[str, ...] = option(
        (),
        'types of inputs and outputs: "keep", "low", "caches" for key-value caches in the low type (the inputs and'
        " outputs that optimum, onnxruntime-genai and transformers.js name `past_key_values.0.key`, `present.0.key` and"
        ' so on), or globs, for example "past_*=float16"; the last match wins',
        metavar="keep|low|caches|GLOB=TYPE",
        help="Types of inputs and outputs: keep, low, caches.",
    )
    narrow: bool | None = option(
        None,
        "True converts float64 computations to float32 before their types are chosen; the model's inputs and outputs"
        " keep float64",
        recorded=IF_CHANGED,
    )
    quantized: Quantized = option(
        "keep",
        '"keep" does not change ops between DequantizeLinear and QuantizeLinear, because runtimes compute them in'
        ' integers; "rescale" (opset 19 or later) gives the scales of quantizers, and the ops between them, the low'
        " type",
        recorded=IF_CHANGED,
    )
    fuse: Fuse = option(
        "auto",
        '"basic" replaces norms, GELU and other functions written out op by op, and folds BatchNormalization; "none"'
        ' disables both; "contrib" also uses onnxruntime\'s own operators, for the target ort-cuda only; "diffusion"'
        " also uses those for [diffusion models](../concepts/fusion.md#diffusion), which run only in float16 on CUDA;"
        ' "auto" is "contrib" for ort-cuda, and "basic" for all other targets',
        help="Fusions: auto, none, basic, contrib, diffusion.",
        recorded=IF_CHANGED,
    )
    assume: Assumption | None = option(
        None,
        '"rows-see-a-key" asserts that no row of an attention mask hides every key, for example because each token'
        " sees itself; attention then omits the test for such rows. If a row does hide every key, the results differ",
        recorded=IF_CHANGED,
    )
    opset: Opset | None = option(
        None,
        'the opset of the result: "auto" for the one that the target supports best, or "keep" for the model\'s own; by'
        " default, the model's own if it is at least 13, and otherwise the lowest opset above 12 with the most kernels"
        " for the target; see [the opset](../concepts/fusion.md#the-opset)",
        metavar="auto|keep|N",
        help="Opset of the result.  [default: at least 13]",
        parse=parse_opset,
        recorded=IF_CHANGED,
    )
    shift: Shift = option(
        "auto",
        "values that exceed float16 according to `data` or `ranges` are scaled by 2⁻ᵏ, which is"
        ' exact: "auto" chooses the smallest k with headroom, a number sets k, and "none" keeps them in float32; see'
        " [range shifting](../concepts/shift.md)",
        metavar="auto|none|K",
        parse=parse_shift,
        recorded=IF_CHANGED,
    )
    placement: Placement | None = option(
        None,
        '"mincut" moves the borders between types to where Casts cost least; "propagate" leaves them where'
        ' TensorFlow\'s rules place them; by default, "mincut", or "propagate" without safety rules',
        recorded=IF_CHANGED,
    )
    gray_follows_allow: bool | None = option(
        None,
        "True lowers a gray op right after an allow op, as TensorFlow does for bfloat16; False lowers it only"
        " between two allow ops, as TensorFlow does for float16; the default is TensorFlow's choice for the type",
    )
    external_data: bool | None = output_option(
        None,
        "store weights in a separate file; by default, only if they exceed 1.5 GB; in Python, an argument of `save`",
    )
    overwrite: bool = output_option(
        False,
        "replace an existing output; in Python, an argument of `save`",
        help="Replace an existing output.",
    )
    fail_on: tuple[str, ...] = output_option(
        (),
        "differences that make `amp-rewrite diff` and `gate` exit with 1: lowered, raised, retyped, attribute, added,"
        " removed, casts; by default, all. `float32` stands for ops that are raised, or added in float32",
        metavar="KIND,…",
        help="Kinds of difference that fail.  [default: all]",
        parse=_kinds,
    )
    ranges: str | None = data_option(
        None,
        "ranges measured by `calibrate`; ops stay in float32 if a value that they read or produce does not fit",
        kind=Kind.PATH,
        metavar="FILE",
        help="Ranges of values, from `amp-rewrite calibrate`.",
    )
    headroom: float | None = data_option(
        None,
        "the factor by which measured values may grow without overflow, for `convert` and `repair`; by default, 2",
        metavar="X",
        parse=check_headroom,
    )
    data: str | None = data_option(
        None,
        "input data for commands that run a model: a .npz file, or a folder of them",
        kind=Kind.PATH,
        metavar="FILE|FOLDER",
        help="Input data: a .npz file, or a folder of them.",
    )
    check: bool = data_option(
        True,
        "without data or ranges, the command runs a random batch in float32 and in the low type, and keeps ops in"
        " float32 if the result is wrong; in Python, `convert(…, check=True)` does so",
        help="Without data, check on one random batch.",
    )
    int_range: tuple[str, ...] = data_option(
        (),
        "range of the integers in a random input, as in `ids=0,100` for 0 to 99; by default, 0 and 1; in Python, an"
        " argument of `Feed.randomly`",
        metavar="NAME=0,100",
    )
    allow_nonfinite: bool | None = data_option(None, "allow NaN and infinity in the data")
    feedback: tuple[str, ...] = data_option(
        (),
        "outputs to feed to inputs of the next run, as in `hn=h` or `present.*=past_key_values.*`, for `verify`,"
        " `calibrate` and conversions with data (for `convert`, use `--set`); in Python, an argument of `Feed.of`",
        metavar="OUT=IN",
        help="Feed output OUT to input IN of the next run; repeatable.",
    )
    steps: int | None = data_option(
        None,
        "with feedback, the number of runs on each batch; each batch then starts a new sequence; by default, all"
        " batches are the steps of one sequence",
        metavar="N",
        help="With --feedback: consecutive runs on each batch.",
    )
    tolerance: float | None = data_option(
        None,
        f"allowed error, relative to the output's largest value; start with {STARTS}",
        metavar="X",
        help="Allowed error, relative to each output's largest value.",
    )
    rtol: float | None = data_option(
        None,
        "tolerance relative to the reference's value, in place of `tolerance`: |a - b| ≤ atol + rtol |a| in every"
        " element",
        metavar="X",
    )
    atol: float | None = data_option(None, "absolute tolerance, added to the relative one", metavar="X")
    metric: str | None = data_option(
        None,
        "a metric and its bound: `cosine=0.999`, `snr=40`, `top1=0.99` or `scaled=0.01`",
        metavar="NAME=X",
        help="Or a metric: cosine=0.999, snr=40, top1=0.99.",
    )
    budget: int | None = data_option(
        None,
        "the maximum number of trials in a repair; by default, 100; in Python, an argument of `repair`",
        metavar="N",
    )
    config: str = ""
    found: tuple[str, ...] = ()
    drawn: Mapping[str, Any] | None = None
    progress: Progress | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name, row in OPTIONS.items():
            object.__setattr__(self, name, row.read(getattr(self, name)))

    @classmethod
    def of(cls, *, progress: Progress | None = None, **options: Unpack[Options]) -> Request:
        """Return the request for a conversion, with options from environment variables, for the installed runtime.

        Raises the errors of `convert`, and TypeError for an unknown keyword.
        """
        check_keyword_names("convert", options, KEYWORDS)
        passed = {name: value for name, value in cast(dict[str, Any], options).items() if not _absent(name, value)}
        request = cls(**{**from_environment(os.environ), **passed}, progress=progress)._resolved()
        assert request.op_lists is not None  # loaded now, to report mistakes in them early
        return request

    def _resolved(self) -> Request:
        """Return the request with the target and the fusions resolved; PolicyError for conflicting options."""
        target = installed(self.target, self.to)
        if self.fuse in ("contrib", "diffusion") and target.family != Target.ORT_CUDA:
            raise PolicyError(
                f"fuse {self.fuse!r} creates operators that only onnxruntime supports, but the target is"
                f" {target.value!r}; use target 'ort-cuda', or fuse 'basic'"
            )
        if self.fuse == "diffusion" and self.to is not DType.FLOAT16:
            raise PolicyError("fuse 'diffusion' creates operators without bfloat16 kernels; use fuse 'contrib'")
        default: Fuse = "contrib" if target.family == Target.ORT_CUDA else "basic"
        return replace(self, target=target, fuse=default if self.fuse == "auto" else self.fuse)

    @cached_property
    def op_lists(self) -> OpLists:
        """The op lists, with the edits in environment variables. ListError if one is invalid."""
        from amp_rewrite.settings.op_lists import environment_edits, load_lists  # late: help and settings need no lists

        return load_lists(self.to, self.lists, environment_edits(os.environ))

    def tell(self, stage: str, done: int = 0, total: int = 1) -> None:
        """Report the start of a stage of the work, or its progress."""
        if self.progress is not None:
            self.progress(stage, done, total)

    @property
    def safe(self) -> bool:
        """True if this project's safety rules apply in addition to TensorFlow's rules."""
        return self.safety == "default"

    @property
    def places(self) -> bool:
        """True if the borders between types are moved to reduce the cost of Casts."""
        default = "mincut" if self.safe else "propagate"
        return (self.placement or default) == "mincut"

    @property
    def keywords(self) -> dict[str, Any]:
        """The keywords for an equal conversion."""
        return {name: getattr(self, name) for name in KEYWORDS}

    @property
    def criterion(self) -> dict[str, Any]:
        """The keywords of the criterion, without None."""
        return {name: value for name in CRITERION if (value := getattr(self, name)) is not None}

    @property
    def settings(self) -> dict[str, str]:
        """The options for report and metadata, as text."""
        defaults = Request(to=self.to, target=self.target)._resolved()
        texts, default = ({name: _spelling(getattr(r, name)) for name in RECORDED} for r in (self, defaults))
        return {name: text for name, text in texts.items() if OPTIONS[name].recorded == ALWAYS or text != default[name]}


def _absent(name: str, value: object) -> bool:
    """True for None and for an empty list, which an environment variable may replace."""
    return value is None or (OPTIONS[name].kind is Kind.LIST and isinstance(value, (list, tuple)) and not value)


def _spelling(value: object) -> str:
    return "" if value is None else str(getattr(value, "value", value))


OPTIONS = field_options(Request)
"""All options, in the order of report and metadata."""
KEYWORDS = {name: row for name, row in OPTIONS.items() if row.group == PRECISION}
"""The options that determine types; these are also the keywords of `convert` in Python."""
RECORDED = tuple(name for name, row in OPTIONS.items() if row.recorded)
"""The options that the header of a report may contain."""
PAINTING = tuple(name for name in KEYWORDS if name in Painting.__annotations__)
"""The keywords of a training step."""
CRITERION = {name: OPTIONS[name] for name in CriterionKeywords.__annotations__}
"""The keywords of a criterion (see `evidence/metric.py`), for `repair` and `verify`, but not for `convert`."""


def from_environment(environ: Mapping[str, str]) -> Mapping[str, object]:
    """Return the options set by environment variables, with lists separated as in PATH; ConfigError if illegal."""
    values: dict[str, object] = {}
    for row in OPTIONS.values():
        if row.environment and (text := environ.get(row.environment)):
            words = tuple(filter(None, text.split(os.pathsep)))
            values[row.name] = row.check(words if row.kind is Kind.LIST else text, row.environment)
    return values
