"""Conversions that fail to load because an element type is said in more places than one."""

from __future__ import annotations

import numpy as np

from suites.catalogue.case import Case

SQUARE = {"w": (8, 8), "w2": (8, 8)}
MISMATCH = r"does not match expected type|bound to different types|inconsistent type|element type|Type Error"

CASES = (
    Case(
        1,
        "a cast of integers to float in the graph",
        """g (int64[8,8] i, float[8,8] x) => (float[8,8] y) {
            f = Cast <to = 1> (i)
            a = MatMul (x, w)
            s = Add (a, f)
            y = MatMul (s, w2)
        }""",
        weights=SQUARE,
        feeds={"i": np.eye(8)},
        fails=MISMATCH,
        lowers="a s y",
    ),
    Case(
        1,
        "a mask made of bools",
        """g (bool[8,8] m, float[8,8] x) => (float[8,8] y) {
            f = Cast <to = 1> (m)
            a = MatMul (x, w)
            s = Mul (a, f)
            y = MatMul (s, w2)
        }""",
        weights=SQUARE,
        fails=MISMATCH,
        lowers="a s y",
    ),
    Case(
        1,
        "an island of doubles",
        """g (float[8,8] x) => (float[8,8] y) {
            a = MatMul (x, w)
            d = Cast <to = 11> (a)
            c = Constant <value = double[1] {1.5}> ()
            e = Mul (d, c)
            f = Cast <to = 1> (e)
            y = MatMul (f, w2)
        }""",
        weights=SQUARE,
        fails=MISMATCH,
        lowers="a y",
    ),
    Case(
        1,
        "a loop's counter cast to float",
        """g (float[8,8] x, int64 trips, bool go) => (float[8,8] y) {
            a = MatMul (x, w)
            b = Loop (trips, go, a) <body = body (int64 i, bool c, float[8,8] s) => (bool more, float[8,8] next) {
                more = Identity (c)
                f = Cast <to = 1> (i)
                t = MatMul (s, w)
                next = Add (t, f)
            }>
            y = MatMul (b, w2)
        }""",
        weights=SQUARE,
        fails=MISMATCH,
        lowers="a t y",
    ),
    Case(
        2,
        "a Constant that states a float and not a tensor",
        """g (float[8,8] x) => (float[8,8] y) {
            a = MatMul (x, w)
            c = Constant <value_float = 0.5> ()
            m = Mul (a, c)
            y = MatMul (m, w2)
        }""",
        weights=SQUARE,
        fails=MISMATCH,
        lowers="a m y",
    ),
    Case(
        2,
        "a Constant that states a list of floats",
        """g (float[8,2] x) => (float[8,2] y) {
            a = MatMul (x, w)
            c = Constant <value_floats = [0.5, 1.5]> ()
            m = Mul (a, c)
            y = MatMul (m, w2)
        }""",
        weights={"w": (2, 2), "w2": (2, 2)},
        fails=MISMATCH,
        lowers="a m y",
    ),
    Case(
        3,
        "a ConstantOfShape that says no type",
        """g (float[8,8] x) => (float[8,8] y) {
            a = MatMul (x, w)
            n = Shape (a)
            z = ConstantOfShape (n)
            s = Add (a, z)
            y = MatMul (s, w2)
        }""",
        weights=SQUARE,
        fails=MISMATCH,
        lowers="a s y",
    ),
    Case(
        3,
        "a ConstantOfShape of zeros and one of ones, both beside a float32 reader",
        """g (float[8,8] x) => (float[8,8] y, float[8,8] z) {
            a = MatMul (x, w)
            n = Shape (a)
            o = ConstantOfShape (n)
            i = ConstantOfShape <value = float[1] {1}> (n)
            s = Sum (a, o, i)
            y = MatMul (s, w2)
            e = Add (o, i)
            z = Exp (e)
        }""",
        weights=SQUARE,
        blocked="Exp",
        fails=MISMATCH,
        lowers="a s y",
        stays="z",
    ),
    Case(
        4,
        "random numbers whose type is an attribute",
        """g (float[8,8] x) => (float[8,8] y) {
            a = MatMul (x, w)
            r = RandomNormal <shape = [8, 8], dtype = 1> ()
            n = Mul (r, zero)
            s = Add (a, n)
            y = MatMul (s, w2)
        }""",
        weights={**SQUARE, "zero": [0]},
        fails=MISMATCH,
        lowers="a y",
    ),
    Case(
        4,
        "random numbers that take the type of another tensor",
        """g (float[8,8] x) => (float[8,8] y) {
            a = MatMul (x, w)
            r = RandomNormalLike (a)
            n = Mul (r, zero)
            s = Add (a, n)
            y = MatMul (s, w2)
        }""",
        weights={**SQUARE, "zero": [0]},
        blocked="RandomNormalLike",
        fails="",
        lowers="a y",
    ),
    Case(
        4,
        "uniform random numbers like a tensor, held in float32",
        """g (float[8,8] x) => (float[8,8] y) {
            a = MatMul (x, w)
            r = RandomUniformLike <dtype = 1> (a)
            n = Mul (r, zero)
            s = Add (a, n)
            y = MatMul (s, w2)
        }""",
        weights={**SQUARE, "zero": [0]},
        fails=MISMATCH,
        lowers="a y",
        options={"keep": ["op=RandomUniformLike"]},
    ),
    Case(
        5,
        "an identity matrix for which no half kernel exists",
        """g (float[8,8] x) => (float[8,8] y) {
            a = MatMul (x, w)
            n = Cast <to = 7> (x)
            e = EyeLike <dtype = 1> (n)
            s = Add (a, e)
            y = MatMul (s, w2)
        }""",
        weights=SQUARE,
        retargets=True,
        fails="Could not find an implementation for EyeLike",
        lowers="a s y",
        stays="e",
    ),
    Case(
        6,
        "a window whose type attribute has a name of its own",
        """g (float[8,8] x) => (float[8,8] y) {
            a = MatMul (x, w)
            n = Constant <value_int = 8> ()
            h = HannWindow <output_datatype = 1> (n)
            m = Mul (a, h)
            y = MatMul (m, w2)
        }""",
        weights=SQUARE,
        fails=MISMATCH,
        retargets=True,
        lowers="a m y",
    ),
    Case(
        7,
        "the mean that a LayerNormalization gives beside its result",
        """g (float[8,8] x) => (float[8,8] y) {
            a = MatMul (x, w)
            n, mean, deviation = LayerNormalization (a, scale, bias)
            b = MatMul (n, w2)
            y = Add (b, mean)
        }""",
        weights={**SQUARE, "scale": np.ones(8), "bias": np.zeros(8)},
        fails=MISMATCH,
        lowers="a n b",
    ),
    Case(
        8,
        "a MatMul after an op of ai.onnx.ml, which gives float32 whatever it reads",
        """g (float[8,8] x) => (float[8,8] y) {
            s = ai.onnx.ml.Scaler <offset = [0.5], scale = [2.0]> (x)
            a = MatMul (s, w)
            y = MatMul (a, w2)
        }""",
        weights=SQUARE,
        domains={"ai.onnx.ml": 3},
        fails=MISMATCH + "|invalid",
        lowers="a y",
        stays="s",
    ),
    *(
        Case(
            9,
            f"Resize of opset {opset}, whose scales are float32 by schema",
            f"""g (float[1,2,4,4] x) => (float[1,2,8,8] y) {{
                a = Conv (x, w)
                scales = Constant <value = float[4] {{1, 1, 2, 2}}> ()
                r = Resize <mode = "nearest"> ({inputs})
                y = Conv (r, w2)
            }}""",
            weights={"w": (2, 2, 1, 1), "w2": (2, 2, 1, 1)},
            opset=opset,
            fails=r"'tensor\(float16\)' of input parameter",
            lowers="a r y",
        )
        for opset, inputs in ((10, "a, scales"), (13, "a, , scales"), (19, "a, , scales"))
    ),
    Case(
        9,
        "Resize of opset 11, whose region of interest must be there and may be empty",
        """g (float[1,2,4,4] x) => (float[1,2,8,8] y) {
            a = Conv (x, w)
            r = Resize <mode = "nearest"> (a, roi, scales)
            y = Conv (r, w2)
        }""",
        weights={"w": (2, 2, 1, 1), "w2": (2, 2, 1, 1), "roi": np.zeros(0), "scales": [1, 1, 2, 2]},
        opset=11,
        fails=r"'tensor\(float16\)' of input parameter",
        lowers="a r y",
    ),
    Case(
        9,
        "Upsample of opset 9",
        """g (float[1,2,4,4] x) => (float[1,2,8,8] y) {
            a = Conv (x, w)
            r = Upsample <mode = "nearest"> (a, scales)
            y = Conv (r, w2)
        }""",
        weights={"w": (2, 2, 1, 1), "w2": (2, 2, 1, 1), "scales": [1, 1, 2, 2]},
        opset=9,
        fails=r"'tensor\(float16\)' of input parameter",
        lowers="a y",
    ),
    Case(
        9,
        "Resize that crops: the region of interest is data",
        """g (float[1,2,4,4] x) => (float[1,2,4,4] y) {
            a = Conv (x, w)
            r = Resize <mode = "linear", coordinate_transformation_mode = "tf_crop_and_resize"> (a, roi, scales)
            y = Conv (r, w2)
        }""",
        weights={
            "w": (2, 2, 1, 1),
            "w2": (2, 2, 1, 1),
            "roi": [0, 0, 0.1, 0.1, 1, 1, 0.7, 0.7],
            "scales": [1, 1, 1, 1],
        },
        fails=r"'tensor\(float16\)' of input parameter",
        lowers="a y",
    ),
    Case(
        10,
        "an empty constant that is region of interest and scales at once",
        """g (float[1,2,4,4] x) => (float[1,2,8,8] y) {
            a = Conv (x, w)
            sizes = Constant <value = int64[4] {1, 2, 8, 8}> ()
            r = Resize <mode = "nearest"> (a, empty, empty, sizes)
            y = Conv (r, w2)
        }""",
        weights={"w": (2, 2, 1, 1), "w2": (2, 2, 1, 1), "empty": np.zeros(0)},
        fails=r"'tensor\(float16\)' of input parameter",
        lowers="a y",
    ),
    Case(
        11,
        "a Pad whose value is a scalar that no tensor holds",
        """g (float[8,8] x) => (float[8,10] y) {
            a = MatMul (x, w)
            v = Constant <value_float = 0.25> ()
            pads = Constant <value_ints = [0, 1, 0, 1]> ()
            p = Pad (a, pads, v)
            y = MatMul (p, w2)
        }""",
        weights={"w": (8, 8), "w2": (10, 10)},
        fails=MISMATCH,
        lowers="a p y",
    ),
    Case(
        11,
        "a Pad of opset 2 in float32, whose value is an attribute",
        """g (float[8,8] x) => (float[8,10] y) {
            a = MatMul (x, w)
            p = Pad <pads = [0, 1, 0, 1], value = 0.25> (a)
            y = MatMul (p, w2)
        }""",
        weights={"w": (8, 8), "w2": (10, 10)},
        opset=9,
        blocked="Pad",
        fails="",
        lowers="a p y",
    ),
    Case(
        11,
        "a Clip without a minimum",
        """g (float[8,8] x) => (float[8,8] y) {
            a = MatMul (x, w)
            high = Constant <value = float {0.5}> ()
            c = Clip (a, , high)
            y = MatMul (c, w2)
        }""",
        weights=SQUARE,
        blocked="Clip",
        fails="Node.*_cast_to_float|Clip|empty|Invalid",
        lowers="a c y",
    ),
)
