"""Reasons: the id of every rule in a report, its words, its strength and its page in the docs.

A constant here is the plain id string that a Pin, a Paint and a report row carry. REASONS maps an id to its record.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

DOCS = "docs/rules"
"""The folder of the pages that `tools/build_rules.py` writes."""


class Strength(IntEnum):
    """Tiers of reasons. Where two reasons disagree about an op, the one of the higher tier decides."""

    SPREAD = 1
    LIST = 2
    GROUP = 3
    PIN = 4
    SAFETY = 5
    USER = 6
    GATE = 7

    @property
    def words(self) -> str:
        """Return the name of a tier in "Who wins" of docs/architecture.md."""
        return _TIERS[self]


_TIERS = {
    Strength.GATE: "schema and kernel gate",
    Strength.USER: "keep and lower patterns",
    Strength.SAFETY: "safety rules",
    Strength.PIN: "pins from data or for training",
    Strength.GROUP: "groups that share a type",
    Strength.LIST: "lists and level",
    Strength.SPREAD: "spreading and placement",
}


@dataclass(frozen=True, slots=True)
class Reason:
    """Why an op has its type: the id in reports, one line of words, the tier and the place in the docs."""

    id: str
    words: str
    strength: Strength

    @property
    def docs(self) -> str:
        """Return the page of a safety rule, else the anchor in the table of all reasons."""
        return f"{DOCS}/{self.id}.md" if self.has_page else f"{DOCS}/README.md#{self.strength.name.lower()}"

    @property
    def has_page(self) -> bool:
        """True for the reasons of safety rules, which `amp-rewrite rule` explains at length."""
        return self.strength is Strength.SAFETY


REASONS: dict[str, Reason] = {}
"""All reasons by id, in the order of the table in docs/reference/report.md."""


def _reason(rule: str, words: str, strength: Strength) -> str:
    REASONS[rule] = Reason(rule, words, strength)
    return rule


ALLOW_ROOT = _reason("allow_root", "on the allow list", Strength.LIST)
FORCE_ALL = _reason("force_all", "the level lowers every op", Strength.LIST)
LOWER_ALL = _reason("lower_all", "the level lowers gray and clear ops as well", Strength.LIST)
LOWER = _reason("lower", "you asked for it", Strength.USER)
BETWEEN_ALLOW = _reason("between_allow", "between lowered ops, with no denied op on the way", Strength.SPREAD)
GRAY_FOLLOWS_ALLOW = _reason("gray_follows_allow", "a gray op right after a lowered one", Strength.SPREAD)
ALLOW_THROUGH_CLEAR = _reason("allow_through_clear", "a clear op beside a lowered one", Strength.SPREAD)
EXISTING_CAST = _reason(
    "existing_cast", "a cast of the model itself, in the type in which all that read it do", Strength.GROUP
)
SEQUENCE_CLUSTER = _reason("sequence_cluster", "shares a sequence, which has one element type", Strength.GROUP)
DENY = _reason("deny", "on the deny list", Strength.LIST)
DENY_FORWARD = _reason(
    "deny_forward", "a denied op reaches it, and what it computes feeds a denied or gray op", Strength.SPREAD
)
KEEP = _reason("keep", "you asked for it", Strength.USER)
RAISED = _reason("raised", "of a low type in the model, and raised to float32", Strength.USER)
UNRAISED = _reason("unraised", "asked to be raised to float32, which cannot be", Strength.USER)
UNLISTED = _reason("unlisted", "on no list", Strength.LIST)
BOUNDARY = _reason("boundary", "the edge of a body or of an unknown op keeps its type", Strength.GATE)
UNPAINTED = _reason("unpainted", "no rule lowers it", Strength.SPREAD)
KERNEL_GATE = _reason("kernel_gate", "the target has no kernel for it", Strength.GATE)
SCHEMA_GATE = _reason("schema_gate", "its operator does not admit the type", Strength.GATE)
KEPT_VARIABLE = _reason("kept_variable", "computed in float32 by every kernel", Strength.GATE)
UNKNOWN_TYPE = _reason("unknown_type", "an element type at it is unknown, so it stays as it is", Strength.GATE)
SHAPE_FOLLOWS = _reason("shape_follows", "reads no element, so it takes its input as it comes", Strength.GROUP)
NORM_TAIL = _reason(
    "norm_tail", "scale and bias of a normalization have the type of what it normalizes", Strength.GROUP
)
CLUSTER = _reason("cluster", "part of one computation that is lowered as a whole or not at all", Strength.SAFETY)
SHAPE_TAINT = _reason("shape_taint", "computes a shape, size, axis or scale", Strength.SAFETY)
INDEX_TAINT = _reason("index_taint", "holds integers in floats", Strength.SAFETY)
ANGLE = _reason("angle", "computes the angle of a Sin or Cos", Strength.SAFETY)
CONSTANT_RANGE = _reason("constant_range", "a constant of it does not fit the type", Strength.SAFETY)
EPSILON = _reason("epsilon", "guards a division with a number below the type's smallest normal one", Strength.SAFETY)
FOLDED = _reason("folded", "computed from constants alone, once, when a model is loaded", Strength.SAFETY)
DISTANCE = _reason(
    "distance", "a distance: small beside the squares and products that it is computed from", Strength.SAFETY
)
PLACES = _reason("places", "adds to places on a grid of positions", Strength.SAFETY)
CANCELLATION = _reason("cancellation", "a variance as a difference of means: small beside them", Strength.SAFETY)
LOGARITHM = _reason("logarithm", "computes the argument of a logarithm, from a softmax or sigmoid on", Strength.SAFETY)
QUANTIZER = _reason("quantizer", "goes beyond the type, by what a quantizer holds times its scale", Strength.SAFETY)
PRODUCT = _reason("product", "a product over an axis, beyond the type at either end by nature", Strength.SAFETY)
GROWTH = _reason("growth", "behind placeholder weights: values outgrow the type there", Strength.SAFETY)
STATISTICS = _reason("statistics", "its statistics do not fit the type", Strength.SAFETY)
ADDITIVE_MASK = _reason("additive_mask", "adds a mask that would overflow", Strength.SAFETY)
OVERFLOW = _reason("overflow", "data showed values that the type cannot hold", Strength.PIN)
UNDERFLOW = _reason("underflow", "data showed values that vanish in the type", Strength.PIN)
NONFINITE = _reason("nonfinite", "data showed infinities that it makes in float32 already", Strength.PIN)
UNSEEN = _reason("unseen", "no data showed what it computes", Strength.PIN)
REPAIR = _reason("repair", "pinned so that the outputs are near enough", Strength.PIN)
LOSS = _reason("loss", "computes the loss of a training step, in float32", Strength.PIN)
UPDATE = _reason("update", "updates the state of a training step, in float32", Strength.PIN)
MIN_CUT = _reason("min_cut", "Casts and float32 cost least if the border between the types runs so", Strength.SPREAD)
JOIN = _reason("join", "lowered values meet here: one Cast behind it instead of several before it", Strength.SPREAD)


def words(rule: str) -> str:
    """Return what a rule says in words; a rule of another version of this package is its own words."""
    return REASONS[rule].words if rule in REASONS else rule


KINDS = {
    "calibrated": "the measured ranges that pins come from",
    "flushed": "small weights become 0 in the low type",
    "fused": "ops replaced by one operator, or computed now",
    "inlined": "a function replaced by its body",
    "not_fused": "ops that compute a known operator and are not replaced by it",
    "opset": "the opset was changed, or what keeps it from being changed",
    "placement": "what moving the border between the types saves",
    "repaired": "ops pinned until the outputs are near enough",
    "saturated": "numbers beyond the type become its largest finite number",
    "selected": "an added mask rewritten as a selection",
    "unchecked": "a check of the result that could not be made",
}
"""Kinds of findings by id. A finding about an op that keeps its type has the id of a reason as its kind."""
