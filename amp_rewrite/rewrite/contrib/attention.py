"""Attention written out, as onnxruntime's MultiHeadAttention: below the opset from which the standard has one.

It reads queries, and gives its result, as tokens by features, where exporters split the heads off and move them; and it
adds numbers to the scores, where they select by a bool. Rows that see no key are kept from it as in `attention`: a
query of zeros weighs all keys alike, and where the model makes 0 of such a row, so does a Where.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx.helper
import onnx.numpy_helper
from onnx import TensorProto

from amp_rewrite.dtypes import DType
from amp_rewrite.ir.builder import Surroundings
from amp_rewrite.ir.dataflow import only_reader
from amp_rewrite.ir.schema import attribute
from amp_rewrite.ir.shapes.onnx_shapes import AllDims, Dims
from amp_rewrite.ir.versions import FIRST_AXES_INPUT, FIRST_REDUCTION_AXES_INPUT
from amp_rewrite.ir.view import Op, ValueId, View
from amp_rewrite.rewrite.attention.fuse import sites
from amp_rewrite.rewrite.attention.layout import RANK, dims_at
from amp_rewrite.rewrite.attention.legality import Site
from amp_rewrite.rewrite.attention.masks import OUT_OF_REACH
from amp_rewrite.rewrite.contrib.attention_equivalence import Base, Trial, mismatch_of
from amp_rewrite.rewrite.contrib.reference import DOMAIN
from amp_rewrite.rewrite.replacement import Context, Outcome, Refusal, Replacement

KIND = "multi_head_attention"
_SWAP = (0, 2, 1, 3)  # heads before tokens, and back


def fuse_attentions(view: View, context: Context) -> Iterator[Outcome]:
    """Replace each attention that is still written out by one node, or refuse it. `attention` reports its own."""
    for last, site in sites(view, context):
        if not isinstance(site, str):
            found = _written(site, context.dims(view))
            yield Refusal(KIND, last, found) if isinstance(found, str) else found


def _written(site: Site, dims: AllDims) -> Outcome | str:
    form = site.form
    if site.heads or form.turned:
        return "its products have three axes" if site.heads else "its result is transposed"
    queries, values = (dims_at(site.view, dims, value) or () for value in (form.queries, form.values))
    sizes = [shape[axis] if shape else None for shape, axis in ((queries, 1), (queries, 3), (values, 3))]
    heads, width, depth = (size if isinstance(size, int) else 0 for size in sizes)
    if not (heads and width and depth):
        return "how many heads it has, and how wide they are, is not known"
    if (site.hides or form.biases) and (site.narrow or not _stated(site, dims)):
        return "its mask does not state batch, heads, every query and every key"
    if site.empty and (site.mask[1] != 1 or not (_boolean(site) or _counts(site))):
        return "a row of its mask may hide every key, and not in each head alike"
    if len({form.queries, form.keys, form.values}) < len(("queries", "keys", "values")):
        return "two of its operands are one"
    return _Writer(site, dims, heads, width, depth).outcome()


def _stated(site: Site, dims: AllDims) -> bool:
    """True if the mask and the biases have four axes."""
    read = [site.form.hiding.value] if site.hides and site.form.hiding is not None else []
    return all(len(dims_at(site.view, dims, value) or ()) == RANK for value in (*read, *site.form.biases))


def _counts(site: Site) -> bool:
    return site.form.hiding is not None and site.form.hiding.counts


def _boolean(site: Site) -> bool:
    return site.form.hiding is not None and site.view.dtype(site.form.hiding.value) is DType.BOOL


class _Writer(Surroundings):
    """The nodes of one attention. `heads` of queries, `width` of each, `depth` of each of the values.

    `bases`: what the nodes read of queries, keys and values, and how they lie there.
    """

    def __init__(self, site: Site, dims: AllDims, heads: int, width: int, depth: int) -> None:
        super().__init__(site.view, site.form.last, typed=True)
        self.site, self.dims = site, dims
        self.heads, self.width, self.depth = heads, width, depth
        self.bases: dict[str, Base] = {}

    def outcome(self) -> Outcome:
        site, form = self.site, self.site.form
        moves = self._moves()
        last = moves[-1] if moves else form.last
        made = last.node.output[0]
        seeing = self._seeing() if site.empty else None
        zeroed = form.zeroed and site.infinite
        reads = [*self._operands(made, None if zeroed else seeing), "", "", self._added()]
        split = any((base.what, base.layout) == ("values", "heads") for base in self.bases.values())
        if split and self.width != self.depth:
            return Refusal(KIND, form.last.id, "its values are not as wide as its keys, and their heads are split off")
        while not reads[-1]:
            reads.pop()
        attended = self._ended(made, seeing if zeroed else None, packed=bool(moves))
        node = onnx.helper.make_node("MultiHeadAttention", reads, [attended], last.node.name, domain=DOMAIN)
        stated: dict[str, Any] = {"num_heads": self.heads, "scale": form.scale}
        stated |= {"unidirectional": 1} if site.causal else {}
        node.attribute.extend(onnx.helper.make_attribute(key, value) for key, value in stated.items())
        node.metadata_props.extend(last.node.metadata_props)
        parts = (tuple(self.ahead), node, tuple(self.behind))
        trial = Trial(site, parts, tuple(self.weights), self.bases, (self.heads, self.width, self.depth), bool(moves))
        why = mismatch_of(trial, made)
        if why is not None:
            return Refusal(KIND, form.last.id, why)
        ops = tuple(sorted({*form.ops, *(op.id for op in moves)}))
        return Replacement(KIND, ops, last.id, node, tuple(self.weights), ahead=parts[0], behind=parts[2])

    # -- what it gives -----------------------------------------------------------------------------

    def _moves(self) -> tuple[Op, ...]:
        """The Transpose and the Reshape that lay the result out as tokens by features; none if it is not so."""
        view, form = self.site.view, self.site.form
        transpose = only_reader(view, form.last.outputs[0], "Transpose")
        reshape = None if transpose is None else only_reader(view, transpose.outputs[0], "Reshape")
        if transpose is None or not _swaps(transpose) or reshape is None or reshape.outputs[0] is None:
            return ()
        queries = dims_at(view, self.dims, form.queries) or ()
        laid = dims_at(view, self.dims, reshape.outputs[0])
        fits = laid == (queries[0], queries[2], self.heads * self.depth) and None not in laid
        return (transpose, reshape) if fits else ()

    def _ended(self, made: str, seeing: str | None, *, packed: bool) -> str:
        """The name of the node's output, from which the nodes behind it make the result."""
        if packed and seeing is None:
            return made
        given = result = self.name(f"{made}_attended")
        if seeing is not None:
            result = made if packed else self.name(f"{made}_seen")
            zero = self.constant(f"{made}_zero", np.zeros((), np.float32))
            self.after("Where", (seeing, given, zero), result)
        if not packed:
            split = self.name(f"{made}_split")
            shape = self.constant(f"{made}_heads", np.array([0, 0, self.heads, self.depth]))
            self.after("Reshape", (result, shape), split)
            self.after("Transpose", (split,), made, perm=_SWAP)
        return given

    # -- what it reads -----------------------------------------------------------------------------

    def _operands(self, made: str, seeing: str | None) -> list[str]:
        form, keys = self.site.form, self.site.keys
        queries = self._packed(form.queries)
        if queries is None:
            swapped = self.before("Transpose", (self._base(form.queries, "queries", "heads"),), f"{made}_q", perm=_SWAP)
            flat = self.constant(f"{made}_flat", np.array([0, 0, self.heads * self.width]))
            read = self.before("Reshape", (swapped, flat), f"{made}_queries")
        else:
            read = self._base(queries, "queries", "packed")
        if seeing is not None:
            zero = self.constant(f"{made}_zero", np.zeros((), np.float32))
            read = self.before("Where", (seeing, read, zero), f"{made}_seeing")
        packed = (self._merged(keys.value) if keys.perm == _SWAP else None) if keys.groups == 1 else None
        if packed is None and keys.groups == 1 and keys.perm == (0, 1, 2, 3):
            packed = self._packed(keys.value)
        values = self._packed(form.values)
        if packed is not None and values is not None:
            return [read, self._base(packed, "keys", "packed"), self._base(values, "values", "packed")]
        if keys.groups == 1 and keys.perm == (0, 1, 2, 3):
            return [read, self._base(keys.value, "keys", "heads"), self._base(form.values, "values", "heads")]
        turned = self._base(form.keys, "keys", "turned")
        upright = self.before("Transpose", (turned,), f"{made}_keys", perm=(0, 1, 3, 2))
        return [read, upright, self._base(form.values, "values", "heads")]

    def _packed(self, value: ValueId) -> ValueId | None:
        """The tokens by features from which a value is made by splitting its heads off and moving them."""
        op = self.site.view.producer(value)
        return self._merged(op.inputs[0]) if op is not None and _swaps(op) else None

    def _merged(self, split: ValueId | None) -> ValueId | None:
        """The same from which a value with heads behind its tokens is made by splitting them off."""
        op = self.site.view.producer(split)
        if split is None or op is None or op.kind != "Reshape" or op.inputs[0] is None:
            return None
        before, after = (dims_at(self.site.view, self.dims, value) or () for value in (op.inputs[0], split))
        return op.inputs[0] if _splits(before, after) and after[2] == self.heads else None

    def _base(self, value: ValueId, what: str, layout: str) -> str:
        name = self.site.view.value_name(value)
        self.bases[name] = Base(what, layout)
        return name

    # -- its mask ----------------------------------------------------------------------------------

    def _added(self) -> str:
        """The name of the value to add to the scores; "" for none."""
        view, form, hiding = self.site.view, self.site.form, self.site.form.hiding
        bias, *more = [view.value_name(value) for value in form.biases] or [""]
        for other in more:
            bias = self.before("Add", (bias, other), f"{bias}_{other}")
        if not self.site.hides or hiding is None or hiding.counts:
            return bias
        stem = view.value_name(hiding.value)
        if _boolean(self.site):
            base = bias or self.constant(f"{stem}_nothing", np.zeros((), np.float32))
            fill = self.constant(f"{stem}_fill", np.array(hiding.fill, np.float32))
            branches = (base, fill) if hiding.shows else (fill, base)
            return self.before("Where", (stem, *branches), f"{bias}{stem}_added")
        return self.before("Add", (bias, stem), f"{bias}{stem}_added") if bias else stem

    def _seeing(self) -> str:
        """One bool for each token: true if its row sees a key."""
        hiding = self.site.form.hiding
        assert hiding is not None
        stem = self.site.view.value_name(hiding.value)
        shown = stem if hiding.shows else self.before("Not", (stem,), f"{stem}_shown")
        if hiding.counts:
            least = self.constant(f"{stem}_least", np.array(OUT_OF_REACH, np.float32))
            shown = self.before("Greater", (stem, least), f"{stem}_seen")
        counted = self.before("Cast", (shown,), f"{stem}_counted", to=TensorProto.INT32)
        most = self._over("ReduceMax", counted, -1, f"{stem}_most", keepdims=1)
        return self._over("Squeeze", self.before("Cast", (most,), f"{stem}_rows", to=9), 1, f"{stem}_seeing")

    # -- nodes -------------------------------------------------------------------------------------

    def _over(self, op_type: str, read: str, axis: int, stem: str, **stated: Any) -> str:
        """A node over one axis, which is an attribute or an input, as the opset has it."""
        first = FIRST_AXES_INPUT if op_type == "Squeeze" else FIRST_REDUCTION_AXES_INPUT
        if self.site.view.opsets.get("", 1) < first:
            return self.before(op_type, (read,), stem, axes=[axis], **stated)
        return self.before(op_type, (read, self.constant(f"{stem}_axis", np.array([axis]))), stem, **stated)


def _swaps(op: Op) -> bool:
    """True if an op swaps heads and tokens."""
    perm = attribute(op.node, "perm") if op.kind == "Transpose" else None
    return perm is not None and tuple(perm.ints) == _SWAP


def _splits(before: Dims, after: Dims) -> bool:
    """True if a Reshape from one to the other splits the last of three axes in two, and does nothing else."""
    if len(before) != RANK - 1 or len(after) != RANK or None in before or before[:2] != after[:2]:
        return False
    whole, *parts = before[2], *after[2:]
    first, second = parts
    return isinstance(first, int) and isinstance(second, int) and whole == first * second
