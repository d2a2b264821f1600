"""Reasons in reports, safety rules, kinds of findings, paints and pins.

The constants are ids, used in pins, paints and report rows. REASONS maps each id to its `Reason`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from importlib import resources
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from amp_rewrite.dtypes import DType
from amp_rewrite.settings.choices import Target

if TYPE_CHECKING:
    from amp_rewrite.ir.view import OpId, View

DOCS = "docs/rules"
"""Folder of the pages written by `tools/build_rules.py`."""
FINDINGS = "docs/reference/findings.md"
"""Page written by `tools/build_findings.py`, with an anchor for each kind."""


class Strength(IntEnum):
    """Tiers of reasons. If two reasons for an op conflict, the one in the higher tier applies."""

    SPREAD, LIST, GROUP, PIN, SAFETY, USER, GATE = range(1, 8)

    @property
    def words(self) -> str:
        """The tier's name under "Precedence" in docs/architecture.md."""
        return _TIERS[self - 1]


_TIERS = (
    "spreading and placement",
    "lists and level",
    "groups that share a type",
    "pins from data or for training",
    "safety rules",
    "keep and lower patterns",
    "schema and kernel gate",
)


@dataclass(frozen=True, slots=True)
class Documented:
    """A rule or fusion with a docs page and two models: a hit and a near miss."""

    name: str
    folder: ClassVar[str]
    """The models' folder in the package."""

    @property
    def docs(self) -> str:
        return f"{DOCS}/{self.name}.md"

    @property
    def pairs(self) -> tuple[str, ...]:
        return (self.name,)

    def model(self, which: str, case: str = "") -> str:
        """Return the ONNX text of one of the models.

        `which`: "hit" for the smallest model that triggers the rule, "near" for the closest one that does not. `case`:
        the pair's name; by default the first pair.
        """
        file = f"{case or self.pairs[0]}.{which}.onnxtxt"
        return resources.files("amp_rewrite").joinpath(self.folder, file).read_text("utf-8")


OVERRIDE = "How to override"
HEADINGS = ("What it protects", "Why", "Examples", OVERRIDE, "Source")
"""Headings in the text of a rule."""
_ADVICE = "Lower individual ops by name or pattern with `--lower`; `--set safety=none` turns off all rules."
"""Appended to the text under OVERRIDE in every rule."""


@dataclass(frozen=True, slots=True)
class Reason(Documented):
    """A reason for the type of an op: its id in reports, a one-line description, and its tier.

    The text of a safety rule is in `rules/NAME.md`: one sentence, then a paragraph under each heading. `findings`: the
    kinds of its findings. `target`: the only target with this rule; "" for all.
    """

    folder = "decide/needs/models"
    words: str
    strength: Strength
    findings: Sequence[str] = ()
    target: str = ""

    @property
    def reason(self) -> str:
        return self.name

    @property
    def docs(self) -> str:
        page = f"{self.name}.md" if self.has_page else f"README.md#{self.strength.name.lower()}"
        return f"{DOCS}/{page}"

    @property
    def has_page(self) -> bool:
        return self.strength is Strength.SAFETY

    @property
    def pairs(self) -> tuple[str, ...]:
        return _PAIRS.get(self.name, (self.name,))

    @property
    def summary(self) -> str:
        return self._parts[0]

    @property
    def sections(self) -> Mapping[str, str]:
        """The text under each heading, on one line, with the advice common to all rules."""
        texts = dict(part.split("\n\n", 1) for part in self._parts[1:])
        texts[OVERRIDE] = " ".join(filter(None, (texts.get(OVERRIDE), _ADVICE)))
        return {head: " ".join(texts[head].split()) for head in HEADINGS}

    @property
    def _parts(self) -> list[str]:
        file = resources.files("amp_rewrite").joinpath("decide/needs/rules", f"{self.name}.md")
        return [part.strip() for part in file.read_text("utf-8").split("\n## ")]


REASONS: dict[str, Reason] = {}
"""All reasons by id."""


def _reason(name: str, words: str, strength: Strength, findings: Sequence[str] = (), target: str = "") -> str:
    REASONS[name] = Reason(name, words, strength, findings, target)
    return name


ALLOW_ROOT = _reason("allow_root", "on the allow list", Strength.LIST)
FORCE_ALL = _reason("force_all", "the level lowers every op", Strength.LIST)
LOWER_ALL = _reason("lower_all", "the level also lowers gray and clear ops", Strength.LIST)
LOWER = _reason("lower", "lowered at your request", Strength.USER)
BETWEEN_ALLOW = _reason("between_allow", "between lowered ops, with no denied op on the way", Strength.SPREAD)
GRAY_FOLLOWS_ALLOW = _reason("gray_follows_allow", "a gray op right after a lowered one", Strength.SPREAD)
ALLOW_THROUGH_CLEAR = _reason("allow_through_clear", "a clear op next to a lowered one", Strength.SPREAD)
EXISTING_CAST = _reason("existing_cast", "a Cast already in the model, in the type of its readers", Strength.GROUP)
SEQUENCE_CLUSTER = _reason("sequence_cluster", "shares a sequence, and a sequence has one element type", Strength.GROUP)
DENY = _reason("deny", "on the deny list", Strength.LIST)
DENY_FORWARD = _reason("deny_forward", "between ops that stay float32", Strength.SPREAD)
KEEP = _reason("keep", "kept in float32 by name, with `keep`", Strength.USER)
RAISED = _reason("raised", "low in the model, and raised to float32", Strength.USER)
UNRAISED = _reason("unraised", "float32 was requested, but is not possible", Strength.USER)
UNLISTED = _reason("unlisted", "not on a list of ops to lower", Strength.LIST)
BOUNDARY = _reason("boundary", "at the edge of a loop, branch or unknown op, where types are fixed", Strength.GATE)
UNPAINTED = _reason("unpainted", "not between lowered ops", Strength.SPREAD)
KERNEL_GATE = _reason("kernel_gate", "the target has no kernel for it in the low type", Strength.GATE)
SCHEMA_GATE = _reason("schema_gate", "its operator does not allow the low type", Strength.GATE)
KEPT_VARIABLE = _reason("kept_variable", "every kernel computes it in float32", Strength.GATE)
UNKNOWN_TYPE = _reason("unknown_type", "the element type of one of its inputs or outputs is unknown", Strength.GATE)
SHAPE_FOLLOWS = _reason("shape_follows", "reads no elements, so it accepts its input in any type", Strength.GROUP)
NORM_TAIL = _reason("norm_tail", "scale or bias of a normalization, in the type of its input", Strength.GROUP)
CLUSTER = _reason("cluster", "part of a computation that stays float32 as a whole, because of data", Strength.GROUP)
WHOLE_NUMBER = _reason(
    "whole_number", "computes counts, indices or shapes, which the low type would round", Strength.SAFETY
)
POSITION = _reason("position", "computes positions or angles, which need the precision of float32", Strength.SAFETY)
MASK_FILL = _reason("mask_fill", "adds a mask that would overflow", Strength.SAFETY, ("saturated",))
CONSTANT_RANGE = _reason("constant_range", "one of its constants does not fit the type", Strength.SAFETY)
MAGNIFIED = _reason("magnified", "a small number that a logarithm, root or divisor magnifies", Strength.SAFETY)
FOLDED = _reason("folded", "computed only from constants, once, at load time", Strength.SAFETY)
CANCELLATION = _reason("cancellation", "a small difference of large squares and products", Strength.SAFETY)
QUANTIZED = _reason("quantized", "runs on integers, between DequantizeLinear and QuantizeLinear", Strength.SAFETY)
RUNNING_SUM = _reason("running_sum", "sums many terms, each small compared to the sum", Strength.SAFETY)
_LONG = "one of the longest sums, which the target would round after each term"
LONG_SUM = _reason("long_sum", _LONG, Strength.SAFETY, target=Target.WEBGPU.value)
NO_GAIN = _reason("no_gain", "lowering it would benefit no lowered product", Strength.SAFETY)
OVERFLOW = _reason("overflow", "data showed values that the type cannot hold", Strength.PIN)
UNDERFLOW = _reason("underflow", "data showed values that underflow in the type", Strength.PIN)
NONFINITE = _reason("nonfinite", "its float32 result is already infinite on the data", Strength.PIN)
UNSEEN = _reason("unseen", "no data reached it", Strength.PIN)
CHECK = _reason("check", "kept in float32 because the check fails on its batch in the low type", Strength.PIN)
REPAIR = _reason("repair", "pinned to keep the outputs within tolerance", Strength.PIN)
LOSS = _reason("loss", "computes the loss of a training step, in float32", Strength.PIN)
UPDATE = _reason("update", "updates the state of a training step, in float32", Strength.PIN)
RUNTIME_FAULT = _reason("runtime_fault", "the target computes it incorrectly in the low type", Strength.PIN)
MIN_CUT = _reason("min_cut", "the border between float32 and the low type costs least here", Strength.SPREAD)

_PAIRS: Mapping[str, tuple[str, ...]] = {
    WHOLE_NUMBER: ("shape_taint", "index_taint", "element_counts", "compared"),
    POSITION: ("angle", "places", "position_bias"),
    MASK_FILL: ("additive_mask", "saturated"),
    CONSTANT_RANGE: (CONSTANT_RANGE, "statistics", "scaled_down", "quantizer"),
    MAGNIFIED: ("epsilon", "logarithm", "front_end", "ranked"),
    CANCELLATION: (CANCELLATION, "distance", "level", "balanced"),
    RUNNING_SUM: ("accumulators", "state", "recursion", "small_step", "disguise", "weighted_mean"),
    NO_GAIN: ("last_product", "tiny_product", "raw"),
}
"""Names of the pairs of models, for rules with more than one pair."""
RULES = tuple(reason for reason in REASONS.values() if reason.has_page)
"""All safety rules. If several apply to an op, its reason comes from the first need that reaches it."""


def words(rule: str) -> str:
    """Return the description of a reason; an id from another version of this package is returned unchanged."""
    reason = REASONS.get(rule)
    return reason.words if reason is not None else rule


_FACTS = {
    "bias": "an attention bias, or a bias much larger than its product, was added in float32, moved or dropped",
    "caches": "float32 inputs that each step extends and returns",
    "calibrated": "measured ranges were used to pin ops",
    "channels_last": "a convolutional model that runs faster on CUDA with options other than onnxruntime's defaults",
    "fused": "ops replaced by one operator, or computed in advance",
    "inlined": "a function replaced by its body",
    "mended": "a defect in the model that runtimes tolerate",
    "narrowed": "float64 ops converted to float32 first",
    "needs_release": "operators that only onnxruntime has, and the oldest release that runs them correctly",
    "not_fused": "ops that compute a known operator but are not replaced by it",
    "opset": "a change of opset, or the reason it was not possible",
    "parted": "Transposes inserted between two Reshapes to prevent a fusion that fails",
    "recurrent_state": "recurrent states that their op's kernel returns in the low type",
    "repaired": "ops pinned until the outputs are within tolerance",
    "selected": "a mask that was added, and is now applied by Where",
    "shifted": "values beyond the range of the type, scaled by a power of two",
    "tf32": "low convolutions next to float32 products: TF32 enables tensor cores, but reduces the products' precision",
}
"""Kinds of findings that are facts."""
_WARNINGS = {
    "mostly_float32": "fewer than a quarter of the operations in products and convolutions are low",
    "float64": "products and convolutions that stay float64",
    "flushed": "small weights become 0 in the low type",
    "kernel_table": "there is no kernel table for the target's release",
    "not_shifted": "a value beyond the range of the type that no shift brings into range",
    "plugin": "an operator that onnx does not know, assumed to be a plugin of the target",
    "runtime_hazard": "a valid model on which a release of a runtime crashes or miscomputes",
    "runtime_only": "operators in the ai.onnx domain that only onnxruntime knows",
    "saturated": "numbers beyond the range of the type become its largest finite number",
    "target_limits": "an opset or IR version that the target does not support",
    "unchecked": "the result could not be checked",
    "widened": "ops in another low type, converted to float32 first",
}
"""Kinds of findings that are warnings."""
KINDS = {**_FACTS, **_WARNINGS}
"""Kinds of findings by id. For a finding about an op that keeps its type, the kind is the id of the reason."""

HARMLESS = "harmless"
"""The word after " · " in a message about a harmless case of a warning."""


def is_fact(kind: str, message: str) -> bool:
    return kind in _FACTS or f" · {HARMLESS}" in message


_MEANINGS = {
    "bias": ("the results are the same, and the product stays low", ""),
    "caches": ("each step casts them to the low type and back", "pass --io low to keep them low between steps"),
    "calibrated": ("inputs beyond these ranges can still overflow", "use data that covers your inputs"),
    "channels_last": ("with default options, each convolution changes the layout twice", "use the message's options"),
    "float64": ("these ops are not lowered", "pass --set narrow=true to convert them to float32 first"),
    "flushed": ("these weights are lost", "pass --data to see the effect on the outputs"),
    "fused": ("fewer kernels, same results up to rounding", "pass --fuse none to keep the ops"),
    "inlined": ("the types of its ops are decided one by one", ""),
    "kernel_table": (
        "another release's kernel table is used",
        "name a release listed in docs/reference/targets.md",
    ),
    "mended": ("other tools may reject the original model", "if they do, export the model again"),
    "mostly_float32": ("the result is hardly faster or smaller", "see the message for the main reasons"),
    "narrowed": ("numbers keep 24 of their 53 significant bits, and must be within ±3.4e38", "check with --data"),
    "needs_release": (
        "older releases and other runtimes reject or miscompute the model",
        "pass --fuse basic to use only standard operators, or --target ort-cuda:RELEASE for an older release",
    ),
    "not_fused": ("same results, more kernel launches", "if speed matters, change these ops in the export"),
    "not_shifted": ("the ops that compute with it stay float32", "try --to bfloat16, which represents larger values"),
    "opset": ("the opset decides which operators and kernels are available", "pass --opset keep to leave it unchanged"),
    "parted": ("the results and kernels are the same, and the model now loads", ""),
    "plugin": ("it stays float32", "check that the target has the plugin"),
    "recurrent_state": (
        "each step rounds them",
        "pass --feedback to measure the loss of accuracy over a stream, or --keep OP to avoid it",
    ),
    "repaired": ("these ops compute in float32", "to keep fewer in float32, pass a looser tolerance"),
    "runtime_hazard": (
        "sessions with default options crash or give wrong numbers",
        "load the model with the options in the message",
    ),
    "runtime_only": ("other runtimes reject the model", "export the model again without onnxruntime's optimizations"),
    "saturated": ("harmless in a mask, an error elsewhere", "outside a mask, --keep the ops that read them"),
    "selected": ("the results are the same in every type, even in fully masked rows", ""),
    "shifted": ("the results are the same, and the ops stay low", "pass --set shift=none to keep them float32"),
    "target_limits": ("the target rejects the model", "pass --opset auto, or use a newer release of the target"),
    "tf32": ("sessions of this package set use_tf32=1 for tensor cores", "pass use_tf32=0 to a session to disable it"),
    "unchecked": ("the model may still be valid", "load it in onnxruntime before you use it"),
    "widened": ("their values may exceed the range of the new type", "check with --data"),
    KERNEL_GATE: ("these ops stay float32", "pass --opset auto to move to an opset with kernels, if there is one"),
    NONFINITE: ("the ops that compute with it stay float32", "check the float32 model on the data"),
    OVERFLOW: ("the ops that compute with them stay float32", "try --to bfloat16, which represents larger values"),
    QUANTIZED: ("the quantizers keep float32 scales", "omit --set quantized=rescale"),
    SCHEMA_GATE: ("these ops stay float32", "pass --opset auto to move to an opset that allows it, if there is one"),
    UNDERFLOW: ("the ops that compute with them stay float32", "try --to bfloat16, which represents smaller values"),
    UNKNOWN_TYPE: ("these ops keep their type", "infer the model's shapes and types first, or export the model again"),
    UNRAISED: ("the op keeps its low type", "name other ops, or convert the float32 model"),
    UNSEEN: ("the ops that compute with it stay float32", "use data that reaches it"),
}
"""Meaning and remedy by kind of finding; a message with its own, after a " · ", takes precedence."""


def meaning(kind: str) -> tuple[str, str]:
    """Return the meaning and the remedy of a kind of finding; empty if its messages give both."""
    return _MEANINGS.get(kind, ("", ""))


def remarked(kind: str, message: str, more: str = "") -> str:
    """Return a finding's message, meaning and remedy: "message · meaning · remedy". `more` follows the message."""
    what, _, rest = message.partition(" · ")
    return " · ".join(filter(None, (what + more, *((rest,) if rest else _MEANINGS.get(kind, ())))))


class Paint(NamedTuple):
    """The type of a variable, with the id of the reason, the op that caused it, and a one-line note for reports."""

    dtype: DType
    rule: str
    because: OpId | None = None
    note: str = ""


def float32(rule: str, because: OpId | None = None, note: str = "") -> Paint:
    return Paint(DType.FLOAT, rule, because, note)


@dataclass(frozen=True, slots=True)
class Pin:
    """A float32 op, with the rule, the op that caused it, and a one-line note for reports.

    `raises`: also raise results that the model computes in a low type. Pins from data do this; rules that only predict
    a problem respect the low type chosen by the model's author.
    """

    op: OpId
    rule: str
    because: OpId | None
    note: str
    raises: bool = False


def described(view: View, op_id: OpId) -> str:
    """Return the name and kind of an op, for a note."""
    return f"{view.ops[op_id].name!r} ({view.ops[op_id].kind})"
