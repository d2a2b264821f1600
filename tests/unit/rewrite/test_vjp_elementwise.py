"""Gradients of elementwise operators."""

from support.train.vjp_case import Case, judged

PAIRS = {
    "of one shape": ((3, 4), (3, 4)),
    "one row for all": ((3, 4), (4,)),
    "one column for all": ((3, 1), (3, 4)),
    "each along a different axis": ((1, 4), (3, 1)),
    "a number": ((), (2, 3)),
    "a dim of 1 in both": ((2, 1, 3), (1, 3)),
    "more axes on the right": ((4,), (2, 3, 4)),
    "an empty axis": ((0, 4), (1, 4)),
    "an empty result from a dim of 1": ((2, 1), (2, 0)),
}
SOME_PAIRS = dict(list(PAIRS.items())[1:4])
BINARY = {
    "Add": lambda t, a, b: a + b,
    "Sub": lambda t, a, b: a - b,
    "Mul": lambda t, a, b: a * b,
    "Div": lambda t, a, b: a / b,
    "Pow": lambda t, a, b: t.pow(a, b),
    "Max": lambda t, a, b: t.maximum(a, b),
    "Min": lambda t, a, b: t.minimum(a, b),
    "Sum": lambda t, a, b: a + b,
    "Mean": lambda t, a, b: (a + b) / 2,
}
UNARY = {
    "Neg": lambda t, x: -x,
    "Abs": lambda t, x: x.abs(),
    "Exp": lambda t, x: x.exp(),
    "Sin": lambda t, x: x.sin(),
    "Cos": lambda t, x: x.cos(),
    "Sinh": lambda t, x: x.sinh(),
    "Cosh": lambda t, x: x.cosh(),
    "Atan": lambda t, x: x.atan(),
    "Asinh": lambda t, x: x.asinh(),
    "Erf": lambda t, x: x.erf(),
    "Sigmoid": lambda t, x: x.sigmoid(),
    "Tanh": lambda t, x: x.tanh(),
    "Softplus": lambda t, x: t.nn.functional.softplus(x),
    "Softsign": lambda t, x: t.nn.functional.softsign(x),
    "Relu": lambda t, x: x.relu(),
    "LeakyRelu": lambda t, x: t.nn.functional.leaky_relu(x, 0.01),
    "Elu": lambda t, x: t.nn.functional.elu(x),
    # The standard defines both constants in float32, torch in float64.
    "Selu": lambda t, x: 1.05070102214813232421875 * t.nn.functional.elu(x, 1.67326319217681884765625),
    "ThresholdedRelu": lambda t, x: t.nn.functional.threshold(x, 1.0, 0.0),
    "HardSigmoid": None,
    "Mish": lambda t, x: t.nn.functional.mish(x),
    "Identity": lambda t, x: x,
}
POSITIVE = {"Log": lambda t, x: x.log(), "Sqrt": lambda t, x: x.sqrt(), "Reciprocal": lambda t, x: 1 / x}
UNIT = {
    "Tan": lambda t, x: x.tan(),
    "Asin": lambda t, x: x.asin(),
    "Acos": lambda t, x: x.acos(),
    "Atanh": lambda t, x: x.atanh(),
}


CASES = (
    *(
        Case(f"{op} {name}", f"y={op}(a,b)", {"a": a, "b": b}, low=0.5, torch=torch)
        for op, torch in BINARY.items()
        for name, (a, b) in (PAIRS if op in ("Mul", "Div") else SOME_PAIRS).items()
    ),
    *(Case(op, f"y={op}(x)", {"x": (3, 5)}, low=-4, high=4, torch=torch) for op, torch in UNARY.items()),
    *(Case(op, f"y={op}(x)", {"x": (3, 5)}, low=0.5, torch=torch) for op, torch in POSITIVE.items()),
    *(Case(op, f"y={op}(x)", {"x": (3, 5)}, low=-0.9, high=0.9, torch=torch) for op, torch in UNIT.items()),
    Case("Acosh", "y=Acosh(x)", {"x": (3, 5)}, low=1.5, high=4, torch=lambda t, x: x.acosh()),

    *(Case(f"{op} of no elements", f"y={op}(x)", {"x": (2, 0)}) for op in ("Relu", "Gelu", "Exp")),

    # The standard defines 1/6 in float32.
    Case("HardSwish", "y=HardSwish(x)", {"x": (3, 5)}, low=-4, high=4, close=2**-20),
    Case("Gelu", "y=Gelu(x)", {"x": (3, 5)}, low=-4, high=4, constants={"r": 2**0.5, "one": 1.0, "half": 0.5},
         meaning="d=Div(x,r);e=Erf(d);p=Add(e,one);q=Mul(p,half);y=Mul(x,q)"),
    Case("Gelu, tanh", "y=Gelu[approximate=tanh](x)", {"x": (3, 5)}, low=-4, high=4),
    Case("LeakyRelu, steep", "y=LeakyRelu[alpha=0.25](x)", {"x": (3, 5)}),
    Case("Elu with another alpha", "y=Elu[alpha=0.5](x)", {"x": (3, 5)}),
    Case("Selu with other constants", "y=Selu[alpha=1.5,gamma=0.75](x)", {"x": (3, 5)}),
    Case("Celu", "y=Celu(x)", {"x": (3, 5)}, single=True, meaning="y=Elu(x)"),
    Case("Celu with another alpha", "y=Celu[alpha=0.5](x)", {"x": (3, 5)}, constants={"a": 0.5},
         single=True, meaning="d=Div(x,a);e=Elu(d);y=Mul(e,a)"),
    *(
        Case(f"{op} and the input itself", f"f={op}(x);y=Add(f,x)", {"x": (3, 5)})
        for op in ("Floor", "Ceil", "Round", "Sign")
    ),
    Case("Swish", "y=Swish(x)", {"x": (3, 5)}, opsets=(24,), torch=lambda t, x: t.nn.functional.silu(x)),
    Case("Swish, steep", "y=Swish[alpha=1.5](x)", {"x": (3, 5)}, opsets=(24,)),
    Case("PRelu", "y=PRelu(x,s)", {"x": (2, 3, 4), "s": (3, 1)}),

    Case("Mod", "y=Mod[fmod=1](a,b)", {"a": (3, 4), "b": (4,)}, values={"b": [0.7, -0.6, 1.1, -1.3]}),
    Case("Max of three", "y=Max(a,b,c)", {"a": (3, 4), "b": (4,), "c": ()}),
    Case("Sum of three", "y=Sum(a,b,c)", {"a": (3, 4), "b": (4,), "c": ()}),
    Case("Mean of three", "y=Mean(a,b,c)", {"a": (3, 4), "b": (4,), "c": ()}),
    Case("Where", "y=Where(c,a,b)", {"c": (3, 1), "a": (4,), "b": (3, 4)}, types={"c": "bool"},
         values={"c": [[1], [0], [1]]}, torch=lambda t, c, a, b: t.where(c, a, b)),
    Case("Where with a broadcasting condition", "y=Where(c,a,b)", {"c": (3, 4), "a": (), "b": (4,)},
         types={"c": "bool"}, values={"c": [[1, 0, 0, 1]] * 3}, torch=lambda t, c, a, b: t.where(c, a, b)),
    Case("Clip to a constant range", "y=Clip(x,l,h)", {"x": (3, 5)}, constants={"l": -0.5, "h": 0.75}),
    Case("Clip from below", "y=Clip(x,l)", {"x": (3, 5)}, constants={"l": -0.5}),
    Case("Clip from above", "y=Clip(x,,h)", {"x": (3, 5)}, constants={"h": 0.5}),

    Case("Clip to computed bounds", "y=Clip(x,l,h)", {"x": (3, 5), "l": (), "h": ()}, values={"l": -0.5, "h": 0.75}),
    Case("Clip to crossed bounds", "y=Clip(x,l,h)", {"x": (3, 5), "l": (), "h": ()}, values={"l": 0.5, "h": -0.75}),
    Case("a square", "y=Pow(x,p)", {"x": (3, 5)}, constants={"p": 2.0}, torch=lambda t, x: x**2),
    Case("a square by an integer", "y=Pow(x,p)", {"x": (3, 5)}, constants={"p": [2]}, torch=lambda t, x: x**2),
    Case("a cube", "y=Pow(x,p)", {"x": (3, 5)}, constants={"p": 3.0}, torch=lambda t, x: x**3),
    Case("powers for each column", "y=Pow(x,p)", {"x": (3, 3)}, low=0.5, constants={"p": [0.0, 1.0, -1.5]}),
    Case("x to the 0 at 0", "y=Pow(x,p)", {"x": (3,)}, values={"x": [0.0, 1.0, -2.0]}, constants={"p": 0.0}),
    Case("0 to a power", "y=Pow(x,p)", {"x": (3,), "p": ()}, wrt=("p",), values={"x": [0.0, 1.0, 3.0], "p": 2.0}),
    Case("a Cast there and back", "h=Cast[to=float](x);y=Mul(h,h)", {"x": (3, 4)}),
    Case("CastLike", "h=CastLike(x,t);y=Mul(h,h)", {"x": (3, 4), "t": (1,)}, wrt=("x",)),
    Case("one value used three times", "e=Exp(x);m=Mul(e,x);y=Sub(m,x)", {"x": (3, 4)}),
    Case("Max of equal numbers", "y=Max(a,b)", {"a": (3,), "b": (3,)}, values={"a": [1, 2, 3], "b": [1, 1, 3]},
         kink=True, torch=lambda t, a, b: t.maximum(a, b)),
    Case("Min of equal numbers", "y=Min(a,b)", {"a": (3,), "b": (3,)}, values={"a": [1, 2, 3], "b": [1, 1, 3]},
         kink=True, torch=lambda t, a, b: t.minimum(a, b)),
    Case("Clip at its bounds", "y=Clip(x,l,h)", {"x": (3,)}, values={"x": [-1, 0, 1]}, constants={"l": -1.0, "h": 1.0},
         kink=True, torch=lambda t, x: x.clamp(-1, 1)),
    *(
        Case(f"{op} at 0", f"y={op}(x)", {"x": (1,)}, values={"x": [0]}, kink=True, torch=UNARY[op])
        for op in ("Relu", "LeakyRelu", "Elu", "Selu", "Abs")
    ),
    *(
        Case(f"{op} at {x}", f"y={op}(x)", {"x": (1,)}, values={"x": [x]}, kink=True, torch=torch)
        for op, torch, edge in (("HardSwish", lambda t, x: t.nn.functional.hardswish(x), 3),)
        for x in (edge, -edge)
    ),
)  # fmt: skip

TestRules = judged(CASES)
