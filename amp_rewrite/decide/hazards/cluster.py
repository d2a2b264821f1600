"""Clusters: a normalization, softmax or activation that the exporter wrote out op by op.

Each is found from one member that is rare (the root of a norm, the error function, the maximum that a softmax
subtracts) and followed a fixed number of steps from there, so that the search is O(nodes). Two things make it a
cluster: nothing but its last result is read outside, and it lies in one graph.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator

from amp_rewrite.decide.pin import Cluster
from amp_rewrite.dtypes import DType
from amp_rewrite.ir.dataflow import computes
from amp_rewrite.ir.view import Op, OpId, ValueId, View

_GATE_DEPTH = 8


def clusters(view: View, dtypes: Collection[DType] = (DType.FLOAT,)) -> tuple[Cluster, ...]:
    """The clusters of a model that compute in these types, in the order of their first ops; no op is in two of them."""
    taken: set[OpId] = set()
    found = []
    vectors = _vectors(view)
    rare = [op for op in view.ops if op.kind in _ANCHORS]
    for matcher, anchors in _MATCHERS:
        for op in rare:
            if op.kind not in anchors or op.id in taken or not computes(view, op, dtypes):
                continue
            cluster = matcher(_Matcher(view, vectors), op)
            if cluster is not None and taken.isdisjoint(cluster.ops):
                taken.update(cluster.ops)
                found.append(cluster)
    return tuple(sorted(found, key=lambda cluster: cluster.ops))


def _vectors(view: View) -> frozenset[ValueId]:
    """The graph inputs whose stated shape has one dimension: scales and biases that the caller feeds."""
    found: set[ValueId] = set()
    for scope in view.scopes:
        flat = {i.name for i in scope.graph.input if len(i.type.tensor_type.shape.dim) == 1}
        found.update(value for value in scope.inputs if view.value_name(value) in flat)
    return frozenset(found)


class _Matcher:
    """One attempt: the ops taken so far, and small steps over the view that look past Casts."""

    def __init__(self, view: View, vectors: frozenset[ValueId]) -> None:
        self.view = view
        self.vectors = vectors
        self.ops: set[OpId] = set()

    # -- steps -------------------------------------------------------------------------------------

    def up(self, value: ValueId | None, *kinds: str) -> Op | None:
        """The op of one of these kinds that makes a value, Casts between taken; None if another makes it."""
        bare = self.bare(value)
        op = self.view.producer(bare)
        if op is None or op.kind not in kinds:
            return None
        self.take_casts(value)
        self.ops.add(op.id)
        return op

    def bare(self, value: ValueId | None) -> ValueId | None:
        """The value behind the Casts and Identities that make a value."""
        while value is not None and (op := self.view.producer(value)) is not None and _transparent(self.view, op):
            value = op.inputs[0]
        return value

    def take_casts(self, value: ValueId | None) -> None:
        while value is not None and (op := self.view.producer(value)) is not None and _transparent(self.view, op):
            self.ops.add(op.id)
            value = op.inputs[0]

    def readers(self, value: ValueId | None) -> Iterator[Op]:
        """The ops that read a value, Casts between looked past."""
        pending = [value]
        while pending:
            value = pending.pop()
            for use in self.view.uses[value] if value is not None else ():
                op = self.view.ops[use.op]
                if _transparent(self.view, op):
                    pending.append(op.outputs[0])
                else:
                    yield op

    def only_reader(self, value: ValueId | None, *kinds: str) -> Op | None:
        """The op of one of these kinds that alone reads a value; Casts between taken."""
        found = {op.id: op for op in self.readers(value)}
        if len(found) != 1:
            return None
        (op,) = found.values()
        if op.kind not in kinds:
            return None
        for read in op.inputs:
            if read is not None and self.bare(read) == self.bare(value):
                self.take_casts_down_to(read, value)
        self.ops.add(op.id)
        return op

    def take_casts_down_to(self, value: ValueId | None, stop: ValueId | None) -> None:
        while value is not None and value != stop and (op := self.view.producer(value)) is not None:
            if not _transparent(self.view, op):
                return
            self.ops.add(op.id)
            value = op.inputs[0]

    def other(self, op: Op, value: ValueId | None) -> ValueId | None:
        """The operand of a binary op that is not this value."""
        rest = [v for v in op.inputs if self.bare(v) != self.bare(value)]
        return rest[0] if len(rest) == 1 else None

    def fixed(self, value: ValueId | None) -> bool:
        """Whether a value is a weight: an initializer, a Constant, or one small op of them."""
        bare = self.bare(value)
        if bare is None:
            return False
        op = self.view.producer(bare)
        if op is None or op.kind == "Constant":
            return self.view.values[bare].tensor is not None
        return all(v is not None and self.view.values[v].tensor is not None for v in op.inputs) and bool(op.inputs)

    def reads(self, op: Op, value: ValueId | None) -> bool:
        return any(self.bare(v) == self.bare(value) for v in op.inputs)

    # -- the end -----------------------------------------------------------------------------------

    def cluster(self, kind: str, entry: ValueId | None, last: Op, tail: Iterable[OpId] = ()) -> Cluster | None:
        """The cluster of what was taken; None if a result of it is read outside, but for the last op's."""
        self._take_entry_casts(entry)
        entry = self._drop_shared_casts(entry)
        scope = self.view.ops[last.id].scope
        for op_id in self.ops:
            op = self.view.ops[op_id]
            if op.scope != scope or (op_id != last.id and not self._encloses(op)):
                return None
        return Cluster(kind, tuple(sorted(self.ops)), entry, tuple(sorted(set(tail))))

    def _take_entry_casts(self, entry: ValueId | None) -> None:
        """Casts of the entry that the cluster alone reads belong to it."""
        for use in self.view.uses[entry] if entry is not None else ():
            op = self.view.ops[use.op]
            readers = [r for v in op.outputs if v is not None for r in self.view.readers(v)]
            if _transparent(self.view, op) and all(r.id in self.ops for r in readers) and self._encloses(op):
                self.ops.add(op.id)

    def _drop_shared_casts(self, entry: ValueId | None) -> ValueId | None:
        """Casts of the entry that others read too stay outside: the entry, then, is what the nearest one gives."""
        for op_id in sorted(self.ops):
            op = self.view.ops[op_id]
            if _transparent(self.view, op) and op.inputs[0] == entry and not self._encloses(op):
                self.ops.discard(op_id)
                entry = op.outputs[0]
        return entry

    def _encloses(self, op: Op) -> bool:
        """Whether nothing but the cluster reads what an op of it gives."""
        for value in op.outputs:
            if value is not None and (value in self.view.yielded or self.view.values[value].public):
                return False
            if value is not None and any(use.op not in self.ops for use in self.view.uses[value]):
                return False
        return True


def _transparent(view: View, op: Op) -> bool:
    """A Cast between floating types, or an Identity."""
    if op.kind == "Identity":
        return True
    ends = (op.inputs[0], op.outputs[0]) if op.kind == "Cast" else ()
    return bool(ends) and all(v is not None and (d := view.dtype(v)) is not None and d.floating for v in ends)


# -- normalizations --------------------------------------------------------------------------------


def _norm(m: _Matcher, root: Op) -> Cluster | None:
    """From the root of a variance, mean square or sum of squares."""
    size = m.bare(root.inputs[0])
    m.take_casts(root.inputs[0])
    m.ops.add(root.id)
    guard = m.up(size, "Add", "Max", "Clip")
    if guard is not None:
        size = next((v for v in guard.inputs if _reduced(m, v)), None)
    mean = m.up(size, *_REDUCTIONS)
    square = m.up(mean.inputs[0], "Pow", "Mul") if mean is not None else None
    if mean is None or square is None:
        return None
    if not _squares(m, square):
        return None
    return _normalized(m, root, m.bare(square.inputs[0]), mean.kind)


_REDUCTIONS = ("ReduceMean", "ReduceSum", "GlobalAveragePool")


def _reduced(m: _Matcher, value: ValueId | None) -> bool:
    op = m.view.producer(m.bare(value))
    return op is not None and op.kind in _REDUCTIONS


def _squares(m: _Matcher, op: Op) -> bool:
    """A product with itself, or a power that is 2 as far as one can tell: onnxruntime looks no closer."""
    if op.kind == "Mul":
        return m.bare(op.inputs[0]) == m.bare(op.inputs[1])
    tensor = m.view.constant(m.bare(op.inputs[1]))
    return tensor is None or bool((m.view.model.array(tensor) == 2).all())


def _normalized(m: _Matcher, root: Op, centered: ValueId | None, reduction: str) -> Cluster | None:
    """From what was squared and the root of its mean to the scale and bias at the end."""
    sub = m.view.producer(centered)
    mean = m.view.producer(m.bare(sub.inputs[1])) if sub is not None and sub.kind == "Sub" else None
    entry = centered
    kind = "rms_normalization" if reduction == "ReduceMean" else "l2_normalization"
    if sub is not None and mean is not None and mean.kind == "ReduceMean" and m.reads(mean, sub.inputs[0]):
        kind, entry = "layer_normalization", m.bare(sub.inputs[0])
        m.ops.update((sub.id, mean.id))
        m.take_casts(sub.inputs[1])
    last = _divided(m, root, kind, centered, entry)
    if last is None:
        return None
    before = set(m.ops)
    end = _tail(m, last, kind)
    return m.cluster(kind, m.bare(entry), end, m.ops - before)


def _divided(m: _Matcher, root: Op, kind: str, centered: ValueId | None, entry: ValueId | None) -> Op | None:
    """The op that divides by the root, or multiplies with its reciprocal. A second Sub of the mean is taken."""
    result, last = _divider(m, root, kind)
    if last is None:
        return None
    numerator = m.bare(m.other(last, result))
    if numerator == m.bare(centered):
        m.take_casts(m.other(last, result))
        return last
    sub = m.up(m.other(last, result), "Sub") if kind == "layer_normalization" else None
    if sub is None or m.bare(sub.inputs[0]) != m.bare(entry):
        return None
    mean = m.up(sub.inputs[1], "ReduceMean")
    return last if mean is not None and m.reads(mean, entry) else None


def _divider(m: _Matcher, root: Op, kind: str) -> tuple[ValueId | None, Op | None]:
    """The divisor (or its reciprocal) and the op that applies it, past bounds and broadcasts in between."""
    between = ("Expand", "Clip", "Max") if kind == "l2_normalization" else ("Expand",)
    result, inverse = root.outputs[0], root.kind == "Pow" and _negative(m.view, root)
    while True:
        step = m.only_reader(result, "Mul") if inverse else m.only_reader(result, "Div", "Reciprocal", *between)
        if step is None or step.kind == "Mul":
            return result, step
        if step.kind == "Div" and not m.fixed(step.inputs[0]):
            return result, step
        inverse = step.kind in ("Div", "Reciprocal")
        result = step.outputs[0]


def _negative(view: View, op: Op) -> bool:
    tensor = view.constant(op.inputs[1])
    return tensor is not None and bool((view.model.array(tensor) < 0).all())


def _tail(m: _Matcher, last: Op, kind: str) -> Op:
    """The op that ends a normalization: its scale Mul and bias Add where weights follow, else the division."""
    if kind == "l2_normalization":
        return last
    for step in ("Mul", "Add") if kind == "layer_normalization" else ("Mul",):
        result = last.outputs[0]
        readers = {op.id: op for op in m.readers(result)}
        if len(readers) != 1 or result in m.view.yielded:
            break
        (op,) = readers.values()
        weight = m.other(op, result)
        if op.kind != step or op.scope != last.scope or not (m.fixed(weight) or m.bare(weight) in m.vectors):
            break
        m.only_reader(result, step)
        last = op
    return last


def _reduced_norm(m: _Matcher, norm: Op) -> Cluster | None:
    """A division by a ReduceL2, with or without a bound below."""
    m.ops.add(norm.id)
    entry = m.bare(norm.inputs[0])
    result = norm.outputs[0]
    step = m.only_reader(result, "Clip", "Max", "Add", "Expand", "Div")
    while step is not None and step.kind != "Div":
        result = step.outputs[0]
        step = m.only_reader(result, "Expand", "Div")
    if step is None or m.bare(step.inputs[0]) != entry or m.bare(step.inputs[1]) != m.bare(result):
        return None
    return m.cluster("l2_normalization", entry, step)


# -- softmax ---------------------------------------------------------------------------------------


def _softmax(m: _Matcher, greatest: Op) -> Cluster | None:
    """exp(x − max x) over its own sum."""
    m.ops.add(greatest.id)
    entry = m.bare(greatest.inputs[0])
    sub = m.only_reader(greatest.outputs[0], "Sub")
    exp = m.only_reader(sub.outputs[0], "Exp") if sub is not None else None
    if sub is None or exp is None or m.bare(sub.inputs[0]) != entry:
        return None
    total = next((op for op in m.readers(exp.outputs[0]) if op.kind == "ReduceSum"), None)
    div = m.only_reader(total.outputs[0], "Div") if total is not None else None
    if total is None or div is None or m.bare(div.inputs[0]) != m.bare(exp.outputs[0]):
        return None
    m.ops.add(total.id)
    m.take_casts_down_to(div.inputs[0], exp.outputs[0])
    m.take_casts_down_to(total.inputs[0], exp.outputs[0])
    return m.cluster("softmax", entry, div)


# -- activations -----------------------------------------------------------------------------------


def _gelu(m: _Matcher, bell: Op) -> Cluster | None:
    """x · ½(1 + erf(x/√2)) or its tanh twin, the products in any order."""
    m.ops.add(bell.id)
    one = m.only_reader(bell.outputs[0], "Add")
    if one is None or not m.fixed(m.other(one, bell.outputs[0])):
        return None
    gate = _gated(m, one)
    if gate is None:
        return None
    entry, last = gate
    kinds = ("Div", "Mul") if bell.kind == "Erf" else ("Add", "Mul", "Pow")
    if not _made_of(m, bell.inputs[0], entry, kinds):
        return None
    return m.cluster("gelu_erf" if bell.kind == "Erf" else "gelu_tanh", entry, last)


def _gated(m: _Matcher, one: Op) -> tuple[ValueId | None, Op] | None:
    """The x that 1 + erf is multiplied with, and the last op of x · ½ · (1 + erf)."""
    first = m.only_reader(one.outputs[0], "Mul")
    if first is None:
        return None
    factor = m.other(first, one.outputs[0])
    if not m.fixed(factor):
        half = m.view.producer(m.bare(factor))
        if half is not None and half.kind in ("Mul", "Div") and _scales(m, half) and _alone(m, half):
            m.take_casts(factor)
            m.ops.add(half.id)
            return m.bare(next(v for v in half.inputs if not m.fixed(v))), first
    last = m.only_reader(first.outputs[0], "Mul", "Div")
    if last is None:
        return None
    rest = m.other(last, first.outputs[0])
    if m.fixed(factor):
        return (m.bare(rest), last) if not m.fixed(rest) else None
    return (m.bare(factor), last) if m.fixed(rest) else None


def _scales(m: _Matcher, op: Op) -> bool:
    return sum(m.fixed(v) for v in op.inputs) == 1


def _alone(m: _Matcher, op: Op) -> bool:
    return len({reader.id for reader in m.readers(op.outputs[0])}) == 1


def _made_of(m: _Matcher, value: ValueId | None, entry: ValueId | None, kinds: tuple[str, ...]) -> bool:
    """Whether a value is made of the entry and constants alone, in a few ops of these kinds; they are taken."""
    pending = [value]
    taken = 0
    while pending:
        value = pending.pop()
        if m.bare(value) == entry or m.fixed(value):
            continue
        before = len(m.ops)
        op = m.up(value, *kinds)
        taken += len(m.ops) > before
        if op is None or taken > _GATE_DEPTH:
            return False
        pending.extend(op.inputs)
    return True


Match = Callable[[_Matcher, Op], Cluster | None]
_MATCHERS: tuple[tuple[Match, tuple[str, ...]], ...] = (
    (_norm, ("Sqrt", "Pow")),
    (_reduced_norm, ("ReduceL2",)),
    (_softmax, ("ReduceMax",)),
    (_gelu, ("Erf", "Tanh")),
)
_ANCHORS = frozenset(kind for _, kinds in _MATCHERS for kind in kinds)
