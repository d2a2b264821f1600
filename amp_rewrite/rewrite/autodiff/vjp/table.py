"""The table of VJPs: one row per kind of op.

To write a row: give one entry per formal input (`row(…)`). An entry is one of

- a function `(v: Call, slot: int) -> str`. It appends the gradient of that input, of the input's shape and element
  type, and returns its name.
- `Stop(because)`: the derivative is zero wherever it exists (Floor, indices, a mask), or the input is a setting.
- `Joint()`: computed with other inputs and captured values, by the row's `together` (Scan, Loop).

`v` is the op (`Call`): `v.g` the gradient of its first output, `v.x(i)` and `v.y(i)` names of inputs and outputs,
`v.attr(name, default)`, `v.shape(i)`, `v.rank(i)`, `v.axis(default)`, `v.constant(i)`. `v.do(op, …)` appends an op,
with numbers as constants of the input's type. `v.b` is the `Builder`, with methods for forms that differ between
opsets. Equal nodes are appended once, so the entries of a row may repeat shared terms. `v.sum_to(gradient, slot)`
reverses a broadcast; `v.shared(gradient, count)` divides for a mean. Dims may be symbolic or unknown: use static
dims, else compute shapes in the graph (`v.b.shape_of`), else raise `v.error(…)`. An integer or bool input needs an
entry only as a placeholder.

Each family is a module with `ROWS` and a test that compares every row with central differences in float64. An
operator without a row, but with a function body in onnx, is replaced by the body (`gradients`).
"""

from __future__ import annotations

from amp_rewrite.rewrite.autodiff.vjp import convolution, elementwise, linear, looping, movement, reduction
from amp_rewrite.rewrite.autodiff.vjp.rule import Rows

VJPS: Rows = {**convolution.ROWS, **elementwise.ROWS, **linear.ROWS, **looping.ROWS, **movement.ROWS, **reduction.ROWS}
