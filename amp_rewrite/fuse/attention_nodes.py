"""The nodes of an attention that is one operator: itself, what brings its operands in order, what its mask needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx.helper
import onnx.numpy_helper
from onnx import NodeProto, TensorProto

from amp_rewrite.files.tensors import Array
from amp_rewrite.fuse.attention_form import LOST
from amp_rewrite.view import MAIN, View

if TYPE_CHECKING:
    from amp_rewrite.fuse.attention import Site
    from amp_rewrite.fuse.attention_layout import Source

_QUERY_AXIS = 2


@dataclass(frozen=True, slots=True)
class Written:
    """The operator, the nodes ahead of it and behind it, and the constants that they read.

    `shown`: the constant among them that stands for a mask whose numbers are known.
    """

    node: NodeProto
    ahead: tuple[NodeProto, ...]
    behind: tuple[NodeProto, ...]
    weights: tuple[TensorProto, ...]
    shown: str | None = None


def write(site: Site) -> Written:
    """The nodes of a site. Those that depend on its mask alone have the same names wherever that mask is read."""
    return _Writer(site.view, site).written()


@dataclass(slots=True)
class _Writer:
    view: View
    site: Site
    ahead: list[NodeProto] = field(default_factory=list)
    behind: list[NodeProto] = field(default_factory=list)
    weights: list[TensorProto] = field(default_factory=list)
    shown: str | None = None

    def written(self) -> Written:
        form, result = self.site.form, self.site.form.last.node.output[0]
        queries = self.view.value_name(form.queries)
        keys, values = self._operand(self.site.keys, "keys"), self.view.value_name(self.site.values.value)
        mask, seeing = self._mask(keys)
        attended = result
        zero = self._constant(f"{seeing}_zero", np.zeros((), np.float32)) if seeing is not None else ""
        if seeing is not None and form.zeroed and self.site.infinite:
            attended = self._name(f"{result}_attended")
            self._node(self.behind, "Where", (seeing, attended, zero), result, f"{form.last.name}_seeing")
        elif seeing is not None:
            queries = self._made("Where", (seeing, queries, zero), f"{result}_queries")
        reads = [queries, keys, values, *([mask] if mask is not None else [])]
        node = onnx.helper.make_node("Attention", reads, [attended], form.last.node.name, scale=form.scale)
        if self.site.causal:
            node.attribute.append(onnx.helper.make_attribute("is_causal", 1))
        return Written(node, tuple(self.ahead), tuple(self.behind), tuple(self.weights), self.shown)

    def _operand(self, source: Source, words: str) -> str:
        name = self.view.value_name(source.value)
        if source.perm == (0, 1, 2, 3):
            return name
        result = self.site.form.last.node.output[0]
        return self._made("Transpose", (name,), f"{result}_{words}", perm=source.perm)

    # -- the mask ----------------------------------------------------------------------------------

    def _mask(self, keys: str) -> tuple[str | None, str | None]:
        """What the operator reads as a mask, and, where a row may see no key, which rows see one."""
        form, seeing = self.site.form, None
        mask = self.view.value_name(form.bias) if form.bias is not None else None
        if self.site.hides:
            shown, seeing = self._shown()
            mask = self._masked(mask, shown, seeing) if mask is not None else shown
        if mask is not None and self.site.narrow:
            mask = self._widened(mask, keys)
        return mask, seeing

    def _masked(self, bias: str, shown: str, seeing: str | None) -> str:
        """A bias with a number far below any score where a key is not shown; 0 in rows that all keys weigh alike in."""
        stem = f"{bias}_{shown}"
        if seeing is not None and not self.site.infinite:
            zero = self._constant(f"{stem}_zero", np.zeros((), np.float32))
            bias = self._made("Where", (seeing, bias, zero), f"{stem}_seeing")
        fill = self._constant(f"{stem}_fill", np.array(LOST, np.float32))
        return self._made("Where", (shown, bias, fill), stem)

    def _shown(self) -> tuple[str, str | None]:
        """A bool that shows some key in each row; and, where the model's own may show none, in which rows it does."""
        hiding = self.site.form.hiding
        assert hiding is not None
        stem = self.view.value_name(hiding.value)
        if hiding.shown is not None and not (hiding.shows and self._boolean(hiding.value)):
            shown = self.shown = self._constant(f"{stem}_shown", hiding.shown)
        elif hiding.shown is not None or hiding.shows:
            shown = stem
        else:
            shown = self._made("Not", (stem,), f"{stem}_shown")
        if not self.site.empty:
            return shown, None
        axis = self._constant(f"{stem}_keys_axis", np.array([-1], np.int64))
        counted = self._made("Cast", (shown,), f"{stem}_counted", to=TensorProto.INT32)
        most = self._made("ReduceMax", (counted, axis), f"{stem}_most", keepdims=1)
        seeing = self._made("Cast", (most,), f"{stem}_seeing", to=TensorProto.BOOL)
        blind = self._made("Not", (seeing,), f"{stem}_blind")
        return self._made("Or", (shown, blind), f"{stem}_seen"), seeing

    def _boolean(self, value: int) -> bool:
        found = self.view.types[value]
        return found is not None and found.dtype is not None and found.dtype.spelling == "bool"

    def _widened(self, mask: str, keys: str) -> str:
        """A mask that states every query and every key; one for all attentions of which it is known to be the same."""
        lengths = self.site.lengths
        known = None not in lengths
        stem = f"{mask}_{lengths[0]}_{lengths[1]}" if known else f"{self.site.form.last.node.output[0]}_mask"
        queries = self.view.value_name(self.site.form.queries)
        stated = [
            self._made("Shape", (read,), f"{stem}_{words}", start=_QUERY_AXIS, end=_QUERY_AXIS + 1)
            for read, words in ((queries, "queries"), (keys, "keys"))
        ]
        shape = self._made("Concat", stated, f"{stem}_lengths", axis=0)
        return self._made("Expand", (mask, shape), f"{stem}_whole")

    # -- nodes -------------------------------------------------------------------------------------

    def _made(self, op_type: str, reads: Sequence[str], stem: str, **attributes: Any) -> str:
        result = self._name(stem)
        self._node(self.ahead, op_type, reads, result, result, **attributes)
        return result

    def _node(
        self, into: list[NodeProto], op_type: str, reads: Sequence[str], result: str, name: str, **attributes: Any
    ) -> None:
        into.append(onnx.helper.make_node(op_type, list(reads), [result], name, **attributes))

    def _constant(self, stem: str, numbers: Array) -> str:
        name = self._name(stem)
        self.weights.append(onnx.numpy_helper.from_array(np.ascontiguousarray(numbers), name))
        return name

    def _name(self, stem: str) -> str:
        scope = self.site.form.last.scope
        name = stem if scope == MAIN else f"{stem}_{scope}"
        while name in self.view.names:
            name += "_"
        return name
