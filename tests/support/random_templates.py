"""Building blocks of random graphs: nodes that compute a 4 by 4 tensor from others, with bounds on their error."""

import math
from collections.abc import Callable
from dataclasses import dataclass

LATEST = 26
Spread = tuple[float, float]
"""The largest magnitude and the largest error of a value; `inf` if unbounded."""
NOTHING_PROMISED = (math.inf, math.inf)


@dataclass(frozen=True, slots=True)
class Template:
    """Nodes that compute `{o}` from `{a}`, `{b}` and a weight `{w}`, at opsets `since` to `until`.

    `spread` maps the operands' spreads to the result's, without the errors of rounding its `roundings` results.
    """

    text: str
    spread: Callable[..., Spread]
    since: int = 9
    until: int = LATEST
    roundings: int = 1
    domain: str = ""

    @property
    def operands(self) -> int:
        return 2 if "{b}" in self.text else 1


def steady(slope: float = 1, top: Callable[[float], float] = lambda m: m) -> Callable[[Spread], Spread]:
    """Return the spread of a function with bounded slope and value."""
    return lambda a: (top(a[0]), slope * a[1])


def _unit(_: float) -> float:
    return 1.6


def _more(size: float) -> float:
    return 2 * size + 1


def unknown(*_: Spread) -> Spread:
    return NOTHING_PROMISED


def _exponential(a: Spread) -> Spread:
    return (math.exp(a[0]), math.exp(a[0] + a[1]) * a[1]) if a[0] + a[1] <= 3 else NOTHING_PROMISED


def _sum(*given: Spread) -> Spread:
    return sum(size for size, _ in given), sum(off for _, off in given)


def _product(a: Spread, b: Spread) -> Spread:
    return a[0] * b[0], a[0] * b[1] + b[0] * a[1] + a[1] * b[1]


def _either(a: Spread, b: Spread) -> Spread:
    return max(a[0], b[0]), max(a[1], b[1])


_COPIES = (
    Template("{o} = Identity ({a})", steady(), roundings=0),
    Template("{o} = Neg ({a})", steady(), roundings=0),
    Template("{o} = Abs ({a})", steady(), roundings=0),
    Template("{o} = Relu ({a})", steady(), roundings=0),
    Template("{o} = Transpose <perm = [1, 0]> ({a})", steady(), roundings=0),
    Template("{o} = Flatten ({a})", steady(), roundings=0),
    Template("{o} = Reshape ({a}, square)", steady(), roundings=0),
    Template("{o} = Dropout ({a})", steady(), roundings=0),
    Template("{o} = Gather ({a}, order)", steady(), roundings=0),
    Template("{o} = Expand ({a}, square)", steady(), roundings=0),
    Template("{o} = Trilu ({a})", steady(), since=14, roundings=0),
    Template(
        "{o}_s = SequenceConstruct ({a}, {b}, {a}) {o}_t = SequenceErase ({o}_s, first) "
        "{o} = SequenceAt ({o}_t, second)",
        lambda a, b: a,
        since=11,
    ),
    Template("{o}_p, {o}_q = Split <axis = 0> ({a}) {o} = Concat <axis = 0> ({o}_q, {o}_p)", steady(), until=17),
    Template("{o}_l = Slice ({a}, two, four, zero) {o} = Tile ({o}_l, twofold)", steady(), since=10),
    Template(
        "{o}_i = Reshape ({a}, image) {o}_m = MaxPool <kernel_shape = [1, 1]> ({o}_i) {o} = Reshape ({o}_m, square)",
        steady(),
    ),
    Template("{o}_u = Unsqueeze <axes = [0]> ({a}) {o} = Squeeze <axes = [0]> ({o}_u)", steady(), until=12),
    Template("{o}_u = Unsqueeze ({a}, zero) {o} = Squeeze ({o}_u, zero)", steady(), since=13),
    Template("{o}_h = Cast <to = 10> ({a}) {o} = Cast <to = 1> ({o}_h)", steady()),
    Template("{o}_d = Cast <to = 11> ({a}) {o}_e = Add ({o}_d, {o}_d) {o} = Cast <to = 1> ({o}_e)", steady(2, _more)),
    Template("{o}_s = SequenceConstruct ({a}, {b}) {o} = SequenceAt ({o}_s, second)", _either, since=11),
    Template("{o}_s = SplitToSequence ({a}, pair) {o} = ConcatFromSequence <axis = 0> ({o}_s)", steady(), since=11),
    Template(
        "{o}_s = SequenceEmpty () {o}_t = SequenceInsert ({o}_s, {a}) {o} = SequenceAt ({o}_t, first)",
        steady(),
        since=11,
    ),
    Template("{o}_s = Optional ({a}) {o} = OptionalGetElement ({o}_s)", steady(), since=15),
)
_PRODUCTS = (
    # Sums of 4 products with weights of at most 0.25 are never larger than their operand.
    Template("{o} = MatMul ({a}, {w})", steady(), roundings=3),
    Template("{o} = Gemm <transB = 1> ({a}, {w}, bias)", steady(1, _more), roundings=3),
    Template(
        "{o}_i = Reshape ({a}, image) {o}_c = Conv ({o}_i, kernel) {o} = Reshape ({o}_c, square)", steady(), roundings=3
    ),
    Template('{o} = Einsum <equation = "ij,jk->ik"> ({a}, {w})', steady(), since=12, roundings=3),
    Template("{o} = com.microsoft.FusedMatMul <transB = 1> ({a}, {w})", steady(), roundings=3, domain="com.microsoft"),
)
_SMOOTH = (
    *(
        Template(f"{{o}} = {op} ({{a}})", steady(1.2, _unit))
        for op in ("Sigmoid", "Tanh", "Erf", "Atan", "Softsign", "HardSigmoid", "Cos", "Sin")
    ),
    *(Template(f"{{o}} = {op} ({{a}})", steady(1.8, _more)) for op in ("Softplus", "Elu", "Selu", "LeakyRelu")),
    *(Template(f"{{o}} = {op} ({{a}})", steady(2), since=since) for op, since in (("HardSwish", 14), ("Gelu", 20))),
    Template("{o} = Mish ({a})", steady(1.2), since=18, roundings=3),
    Template("{o} = Exp ({a})", _exponential),
    Template("{o} = Softmax <axis = 1> ({a})", steady(2, _unit)),
    Template("{o}_s = LogSoftmax <axis = 1> ({a}) {o} = Sigmoid ({o}_s)", steady(2, _unit), roundings=3),
    Template("{o} = com.microsoft.FastGelu ({a})", steady(1.2), roundings=2, domain="com.microsoft"),
    Template("{o} = com.microsoft.QuickGelu ({a})", steady(1.4), roundings=2, domain="com.microsoft"),
    Template("{o} = com.microsoft.BiasGelu ({a}, ones)", steady(1.2, _more), roundings=3, domain="com.microsoft"),
    Template("{o} = own.F ({a})", steady(1, _unit), since=15, roundings=3, domain="own"),
    Template("{o} = BatchNormalization ({a}, ones, ones, ones, ones)", steady(1, _more), roundings=3),
    Template("{o} = Clip ({a}, , high)", steady(), since=11),
    Template("{o} = Clip <max = 0.5> ({a})", steady(), until=10),
)
_SUMS = (
    Template("{o} = Add ({a}, {b})", _sum),
    Template("{o} = Sub ({a}, {b})", _sum),
    Template("{o} = Sum ({a}, {b}, {a})", lambda a, b: _sum(a, b, a), roundings=2),
    Template("{o} = Mean ({a}, {b})", _either, roundings=3),
    Template("{o} = Max ({a}, {b})", _either),
    Template("{o} = Min ({a}, {b})", _either),
    Template("{o} = Mul ({a}, {b})", _product),
    Template("{o} = Where (mask, {a}, {b})", _either),
    Template("{o}_f = Cast <to = 1> (mask) {o}_p = Mul ({a}, {o}_f) {o} = Add ({o}_p, {b})", _sum, roundings=2),
    Template("{o}_c = Concat <axis = 0> ({a}, {b}) {o} = Gather ({o}_c, odd)", _either),
    Template("{o} = Scan <num_scan_inputs = 1, body = s_{o} (float[4] {o}_1, float[4] {o}_2) => (float[4] {o}_3, "
             "float[4] {o}_4) {{ {o}_5 = MatMul ({o}_1, w0) {o}_6 = Add ({o}_5, {o}_2) {o}_3 = Tanh ({o}_6) "
             "{o}_4 = Identity ({o}_3) }}> (ones, {a})".replace("{o} = Scan", "{o}_l, {o} = Scan"),
             steady(4, _unit), since=11, roundings=20),
)  # fmt: skip
_REDUCTIONS = (
    *(
        Template(f"{{o}}_r = {op} {by} {{o}} = Sub ({{a}}, {{o}}_r)", steady(5, lambda m: 5 * m), since, until, 6)
        for op, split in (("ReduceSum", 13), ("ReduceMean", 18), ("ReduceMax", 18))
        for by, since, until in (("<axes = [1]> ({a})", 9, split - 1), ("({a}, axis)", split, LATEST))
    ),
    Template("{o} = CumSum ({a}, first)", steady(4, lambda m: 4 * m), since=11, roundings=4),
)
_UNPROMISED = (
    *(
        Template(text, unknown, since)
        for text, since in (
            ("{o} = Floor ({a})", 9),
            ("{o} = Ceil ({a})", 9),
            ("{o} = Round ({a})", 11),
            ("{o} = Sign ({a})", 9),
            ("{o} = ThresholdedRelu ({a})", 10),
            ("{o}_i = ArgMax <axis = 1> ({a}) {o}_f = Cast <to = 1> ({o}_i) {o} = Mul ({a}, {o}_f)", 9),
            ("{o}_k, {o}_i = TopK <axis = 1> ({a}, four) {o} = Gather ({o}_k, order)", 10),
            ("{o}_s = Shape ({a}) {o}_c = ConstantOfShape ({o}_s) {o} = Sub ({a}, {o}_c)", 9),
            ("{o}_n = Cast <to = 7> ({a}) {o} = Cast <to = 1> ({o}_n)", 9),
            ("{o} = Log ({a})", 9),
            ("{o}_a = Abs ({a}) {o} = Sqrt ({o}_a)", 9),
            ("{o} = Reciprocal ({a})", 9),
            ("{o}_m = Greater ({a}, {b}) {o}_f = Cast <to = 1> ({o}_m) {o} = Add ({a}, {o}_f)", 9),
            ("{o}_e = Less ({a}, {b}) {o} = Where ({o}_e, {a}, {b})", 9),
            ("{o}_e = Equal ({a}, {b}) {o} = Where ({o}_e, {a}, {b})", 11),
            (
                "{o}_s = SequenceConstruct ({a}, {b}) {o}_n = SequenceLength ({o}_s) {o}_f = Cast <to = 1> ({o}_n) "
                "{o} = Mul ({a}, {o}_f)",
                11,
            ),
            ("{o} = Div ({a}, {b})", 9),
            ("{o} = Pow ({a}, {b})", 9),
            ("{o}, {o}_m = LayerNormalization ({a}, ones)", 17),
        )
    ),
    Template("{o} = com.microsoft.SkipLayerNormalization ({a}, {b}, ones)", unknown, domain="com.microsoft"),
)
TEMPLATES = (*_COPIES, *_PRODUCTS, *_PRODUCTS, *_SMOOTH, *_SUMS, *_REDUCTIONS, *_UNPROMISED)
