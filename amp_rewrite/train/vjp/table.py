"""The table of VJPs: one row per operator, `VJPS[domain, op_type]`; ai.onnx is "".

How to write a row. A row has one entry per formal input (`row(…)`, see `row`); an entry is

- a function `(v: Call, slot: int) -> str` that appends the gradient of that input and returns its name, of the
  input's shape and element type;
- `Stop(because)`: the derivative is zero wherever it exists (Floor, indices, a mask);
- `Refuse(because)`: there is a derivative, and no rule for it: an error where it is needed;
- `Joint()`: it is made with those of other inputs and of what bodies read, by the row's `together` (Scan, Loop).

`v` is the op (`Call`): `v.g` the gradient of its first output, `v.x(i)` and `v.y(i)` names of inputs and outputs,
`v.attr(name, default)`, `v.shape(i)`, `v.rank(i)`, `v.axis(default)`, `v.constant(i)`; `v.do(op, …)` appends an
op, with numbers as constants of the input's type, and `v.b` is the `Builder` with the forms that differ between
opsets. Equal nodes are appended once, so the entries of a row may each write out what they share. What was
broadcast is summed back with `v.sum_to(gradient, slot)`; a mean divides with `v.shared(gradient, count)`. Dims may
be symbolic or unknown: use what is static, else compute shapes in the graph (`v.b.shape_of`), else raise
`v.error(…)`. An integer or bool input needs an entry for its place only.

Each family is a module with `ROWS`, and has a test in which every row stands against central differences in
float64. Operators without a row that onnx gives a function body are replaced by the body (`gradients`).
"""

from __future__ import annotations

from amp_rewrite.train.vjp import (
    branching,
    classification,
    convolution,
    einsum,
    elementwise,
    indexing,
    linear,
    looping,
    normalization,
    reduction,
    resizing,
    sampling,
    shape,
)
from amp_rewrite.train.vjp.row import Rows

VJPS: Rows = {
    **branching.ROWS,
    **classification.ROWS,
    **convolution.ROWS,
    **einsum.ROWS,
    **elementwise.ROWS,
    **indexing.ROWS,
    **linear.ROWS,
    **looping.ROWS,
    **normalization.ROWS,
    **reduction.ROWS,
    **resizing.ROWS,
    **sampling.ROWS,
    **shape.ROWS,
}
