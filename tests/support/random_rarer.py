"""Templates of rarer operators and odd corners of the format.

Their errors are unbounded; every other invariant must hold.
"""

from collections.abc import Iterator

import numpy as np

from support.random_templates import LATEST, Template, unknown

_IMAGE = "{o}_i = Reshape ({a}, image) "
_BACK = " {o} = Reshape ({o}_c, square)"
_ROWS = "{o}_i = Reshape ({a}, rows) "

PLAIN = (
    *(
        (f"{{o}} = {op} ({{a}})", 9)
        for op in ("Acos", "Acosh", "Asin", "Asinh", "Atanh", "Cosh", "Shrink", "Sinh", "Tan")
    ),
    *((f"{{o}} = {op} ({{a}})", since) for op, since in (("Celu", 12), ("Mish", 18))),
    *((f"{{o}} = {op} <axis = 1> ({{a}})", 9) for op in ("Hardmax", "LpNormalization")),
    ("{o} = PRelu ({a}, ones)", 9),
    ("{o}_f = CastLike ({a}, {b}) {o} = Mod <fmod = 1> ({o}_f, ones)", 15),
    ("{o} = CumProd ({a}, first)", 26),
)
CHOOSING = (
    *(
        (f"{{o}}_n = {op} ({{a}}) {{o}} = Where ({{o}}_n, {{b}}, {{a}})", since)
        for op, since in (("IsNaN", 9), ("IsInf", 10))
    ),
    *(
        (f"{{o}}_n = {op} ({{a}}, {{b}}) {{o}} = Where ({{o}}_n, {{b}}, {{a}})", since)
        for op, since in (("GreaterOrEqual", 12), ("LessOrEqual", 12))
    ),
    ("{o}_i = ArgMin <axis = 1> ({a}) {o}_f = Cast <to = 1> ({o}_i) {o} = Add ({a}, {o}_f)", 9),
    ("{o}_n = Size ({a}) {o}_f = Cast <to = 1> ({o}_n) {o} = Div ({a}, {o}_f)", 9),
    ("{o}_z = NonZero ({a}) {o}_f = Cast <to = 1> ({o}_z) {o}_r = ReduceMax <keepdims = 0> ({o}_f) "
     "{o} = Add ({a}, {o}_r)", 9),
    ("{o}_h = OneHot <axis = -1> (order, deep, toggle) {o} = MatMul ({a}, {o}_h)", 9),
    ("{o}_k = Compress <axis = 0> ({a}, keeping) {o}_t = Concat <axis = 0> ({o}_k, {o}_k) "
     "{o} = Reshape ({o}_t, square)", 9),
    ("{o} = GatherElements <axis = 0> ({a}, places)", 11),
    ("{o} = GatherND ({a}, points)", 11),
    ("{o} = ScatterElements <axis = 0> ({a}, places, {b})", 11),
    ("{o} = ScatterND ({a}, points, {b})", 11),
    ("{o} = ReverseSequence <batch_axis = 0, time_axis = 1> ({a}, fours)", 10),
    ("{o}_e = EyeLike <dtype = 1> ({a}) {o} = Add ({a}, {o}_e)", 9),
    ("{o}_r = RandomNormalLike <seed = 1.0> ({a}) {o} = Mul ({a}, {o}_r)", 9, 21),
    ("{o}_u, , {o}_v = Unique ({a}) {o}_r = ReduceMax <keepdims = 0> ({o}_u) {o} = Add ({a}, {o}_r)", 11),
)  # fmt: skip
IMAGES = (
    (_IMAGE + "{o}_c = ConvTranspose ({o}_i, kernel)" + _BACK, 9),
    (_IMAGE + "{o}_c = AveragePool <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> ({o}_i)" + _BACK, 9),
    (_IMAGE + "{o}_c, {o}_x = MaxPool <kernel_shape = [1, 1]> ({o}_i)" + _BACK, 9),
    (_IMAGE + "{o}_c = LpPool <kernel_shape = [1, 1]> ({o}_i)" + _BACK, 9),
    (_IMAGE + "{o}_c = InstanceNormalization ({o}_i, single, single)" + _BACK, 9),
    (_IMAGE + "{o}_c = LRN <size = 1> ({o}_i)" + _BACK, 9),
    (_IMAGE + "{o}_c = MeanVarianceNormalization ({o}_i)" + _BACK, 9, 12),
    (_IMAGE + "{o}_g = GlobalAveragePool ({o}_i) {o}_m = GlobalMaxPool ({o}_i) "
     "{o}_c = Sum ({o}_i, {o}_g, {o}_m)" + _BACK, 9),
    (_IMAGE + "{o}_s = SpaceToDepth <blocksize = 2> ({o}_i) {o}_c = DepthToSpace <blocksize = 2> ({o}_s)" + _BACK, 9),
    (_IMAGE + '{o}_c = Resize <mode = "linear"> ({o}_i, , unscaled)' + _BACK, 13),
    (_IMAGE + '{o}_c = Resize <mode = "nearest"> ({o}_i, empty, unscaled)' + _BACK, 11),
    (_IMAGE + "{o}_p = AffineGrid (looks, image) {o}_c = GridSample ({o}_i, {o}_p)" + _BACK, 20),
    (_IMAGE + "{o}_c = GroupNormalization <num_groups = 1> ({o}_i, single, single)" + _BACK, 21),
    (_IMAGE + "{o}_c = Attention ({o}_i, {o}_i, {o}_i)" + _BACK, 23),
    ("{o} = RMSNormalization ({a}, ones)", 23),
    ("{o}_p = Pad ({a}, around, high) {o}_c = CenterCropPad ({o}_p, square) {o} = Neg ({o}_c)", 18),
    ("{o}_p = Pad ({a}, below, high) {o} = Slice ({o}_p, zero, four, zero)", 11),
)  # fmt: skip
REDUCTIONS = tuple(
    (f"{{o}}_r = {op} {by} {{o}} = Mul ({{a}}, {{o}}_r)", since, until)
    for op in ("ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMin", "ReduceProd", "ReduceSumSquare")
    for by, since, until in (("<axes = [1]> ({a})", 9, 17), ("({a}, axis)", 18, LATEST))
)
RECURRENT = (
    (
        _ROWS
        + ", {o}_h = GRU <hidden_size = 4> ({o}_i, gru_w, gru_r) {o}_v = Reshape ({o}_h, line) {o} = Add ({a}, {o}_v)",
        9,
    ),
    (_ROWS + "{o}_c, , {o}_l = LSTM <hidden_size = 4> ({o}_i, lstm_w, lstm_r) {o} = Reshape ({o}_c, square)", 9),
    (_ROWS + "{o}_c = RNN <hidden_size = 4> ({o}_i, rnn_w, rnn_w) {o} = Reshape ({o}_c, square)", 9),
)
HOLDING = (
    # Sequences and optionals across the edges of bodies, and bodies over sequences.
    ("{o}_e = SequenceConstruct ({a}) {o}_s = Loop (trips, yes, {o}_e) <body = l_{o} (int64 {o}_1, bool {o}_2, "
     "seq(float[4,4]) {o}_3) => (bool {o}_4, seq(float[4,4]) {o}_5) {{ {o}_4 = Identity ({o}_2) "
     "{o}_6 = MatMul ({a}, w0) {o}_5 = SequenceInsert ({o}_3, {o}_6) }}> {o} = SequenceAt ({o}_s, second)", 13),
    ("{o}_s = If (c) <then_branch = t_{o} () => (seq(float[4,4]) {o}_1) {{ {o}_1 = SequenceConstruct ({a}, {b}) }}, "
     "else_branch = e_{o} () => (seq(float[4,4]) {o}_2) {{ {o}_3 = Exp ({b}) "
     "{o}_2 = SequenceConstruct ({o}_3, {a}) }}> {o} = SequenceAt ({o}_s, first)", 13),
    ("{o}_s = If (c) <then_branch = t_{o} () => (optional(float[4,4]) {o}_1) {{ {o}_1 = Optional ({a}) }}, "
     "else_branch = e_{o} () => (optional(float[4,4]) {o}_2) {{ {o}_2 = Optional ({b}) }}> "
     "{o} = OptionalGetElement ({o}_s)", 16),
    ("{o}_s = SequenceConstruct ({a}, {b}) {o}_t = SequenceMap ({o}_s) <body = m_{o} (float[4,4] {o}_1) => "
     "(float[4,4] {o}_2) {{ {o}_3 = MatMul ({o}_1, w0) {o}_2 = Add ({o}_3, {a}) }}> "
     "{o} = SequenceAt ({o}_t, second)", 17),
    # A loop that stops by itself, carries two values and stacks a third.
    ("{o}_x, {o}_y, {o}_z = Loop (trips, , {a}, {b}) <body = w_{o} (int64 {o}_1, bool {o}_2, float[4,4] {o}_3, "
     "float[4,4] {o}_4) => (bool {o}_5, float[4,4] {o}_6, float[4,4] {o}_7, float[4,4] {o}_8) {{ "
     "{o}_6 = MatMul ({o}_4, w0) {o}_7 = Identity ({o}_3) {o}_9 = ReduceMax <keepdims = 0> ({o}_6) "
     "{o}_5 = Less ({o}_9, high) {o}_8 = Add ({o}_3, {o}_4) }}> {o}_q = Gather ({o}_z, first) "
     "{o} = Sum ({o}_x, {o}_y, {o}_q)", 11),
)  # fmt: skip
TYPES = (
    # Other types in the source model.
    ("{o}_h = Cast <to = 10> ({a}) {o}_m = MatMul ({o}_h, halved) {o} = Cast <to = 1> ({o}_m)", 9),
    ("{o}_q = QuantizeLinear ({a}, step) {o}_d = DequantizeLinear ({o}_q, step) {o} = Add ({o}_d, {b})", 10),
    ("{o}_q, {o}_s, {o}_p = DynamicQuantizeLinear ({a}) {o}_d = DequantizeLinear ({o}_q, {o}_s, {o}_p) "
     "{o} = Neg ({o}_d)", 11),
    ("{o}_r = Range (nought, high, step) {o}_m = ReduceMax <keepdims = 0> ({o}_r) {o} = Mul ({a}, {o}_m)", 11),
    ("{o}_k = Constant <value_float = 0.5> () {o}_l = Constant <value_floats = [0.5, 0.25, 1.0, 2.0]> () "
     "{o}_m = Mul ({a}, {o}_k) {o} = Mul ({o}_m, {o}_l)", 12),
)  # fmt: skip
CONTRIB = (
    ("{o} = com.microsoft.FusedGemm <activation = \"Relu\"> ({a}, {w}, bias)", 9),
    ("{o} = com.microsoft.TransposeMatMul <transA = 1> ({a}, {w})", 9),
    ("{o}, , , {o}_s = com.microsoft.SkipLayerNormalization ({a}, {b}, ones, bias)", 9),
    ("{o}, , , {o}_s = com.microsoft.SkipSimplifiedLayerNormalization ({a}, {b}, ones)", 9),
    ("{o}_j = Reshape ({a}, batch) {o}_c = com.microsoft.MultiHeadAttention <num_heads = 2> ({o}_j, {o}_j, {o}_j)"
     + _BACK, 9),
)  # fmt: skip
OWN = (("{o}, {o}_u = own.G <slope = 0.25> ({a})", 16), ("{o} = own.H ({a}, {b})", 16))
"""Functions with an attribute, a second result, an inner function or a body: `FUNCTIONS`."""

FUNCTIONS = """
<domain: "own", opset_import: ["": {opset}, "own": 1]>
G <slope> (u) => (v, r) {{ f = own.F (u) v = LeakyRelu <alpha: float = @slope> (f) r = Exp (f) }}
<domain: "own", opset_import: ["": {opset}]>
H (u, r) => (v) {{
    s = ReduceSum <keepdims = 0> (u)
    k = Constant <value = float {{0.5}}> ()
    t = Less (s, k)
    v = If (t) <
        then_branch = t () => (float[4,4] p) {{ p = MatMul (u, r) }},
        else_branch = e () => (float[4,4] q) {{ q = Exp (r) }}
    >
}}
"""


def _made() -> Iterator[Template]:
    for text, *opsets in (*PLAIN, *CHOOSING, *IMAGES, *REDUCTIONS, *RECURRENT, *HOLDING, *TYPES):
        yield Template(text, unknown, *opsets)
    for domain, texts in (("com.microsoft", CONTRIB), ("own", OWN)):
        for text, since in texts:
            yield Template(text, unknown, since, domain=domain)


RARER = tuple(_made())


def _constants() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(8)
    integers = {
        "rows": [4, 1, 4],
        "batch": [1, 4, 4],
        "deep": 4,
        "places": rng.integers(0, 4, (4, 4)),
        "points": [[3], [0], [2], [1]],
        "fours": [4, 4, 4, 4],
        "around": [1, 1, 1, 1],
        "below": [0, 0, 2, 0],
        "line": [1, 4],
    }
    floats = {
        "toggle": [0, 1],
        "single": [1],
        "unscaled": np.ones(4),
        "empty": np.zeros(0),
        "looks": [[[1, 0, 0], [0, 1, 0]]],
        "step": 0.125,
        "nought": 0,
        "rnn_w": rng.uniform(-0.5, 0.5, (1, 4, 4)),
        **{f"gru_{side}": rng.uniform(-0.5, 0.5, (1, 12, 4)) for side in "wr"},
        **{f"lstm_{side}": rng.uniform(-0.5, 0.5, (1, 16, 4)) for side in "wr"},
    }
    return {
        **{name: np.array(value, np.int64) for name, value in integers.items()},
        **{name: np.array(value, np.float32) for name, value in floats.items()},
        "halved": np.full((4, 4), 0.25, np.float16),
        "keeping": np.array([True, False, True, False]),
    }


CONSTANTS = _constants()
"""Constants of only these templates."""
