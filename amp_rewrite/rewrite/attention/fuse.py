"""Attention written out op by op, as the one operator that opset 23 has for it.

Rows that see no key are the trap. Softmax of finite fills gives every key the same weight; the operator, by its
errata, gives 0, and runtimes have given that, NaN or the mean of all values. So no such row ever reaches the operator:
it is shown every key by a query of zeros, which weighs all keys alike; where the model makes 0 of it, so does a Where.
"""

from __future__ import annotations

from collections.abc import Iterator

from amp_rewrite.decide.needs.forward import Facts
from amp_rewrite.ir.versions import FIRST_FUSED
from amp_rewrite.ir.view import OpId, View
from amp_rewrite.rewrite.attention.build import KIND, write
from amp_rewrite.rewrite.attention.equivalence import mismatch_of
from amp_rewrite.rewrite.attention.legality import FusibleAttention, site_of
from amp_rewrite.rewrite.attention.recognize import AttentionForm, form_of
from amp_rewrite.rewrite.replacement import Context, Outcome, Refusal, judged, too_old


def fuse_attention(view: View, context: Context) -> Iterator[Outcome]:
    """Replace each attention that is written out by one operator, or refuse it."""
    opset = view.opset
    first = FIRST_FUSED["Attention"]
    if opset < first:
        for last, form in forms(view):
            yield Refusal(KIND, last, form if isinstance(form, str) else too_old(opset, "Attention", first, context))
        return
    for last, site in sites(view, context):
        if isinstance(site, str):
            yield Refusal(KIND, last, site)
        else:
            written = write(site)
            yield judged(KIND, last, mismatch_of(site, written) or written)


def sites(view: View, context: Context) -> Iterator[tuple[OpId, FusibleAttention | str]]:
    """Yield each attention that is written out, at any opset, by its last op: its site, or why one operator cannot
    compute it. Equivalence is not proved yet."""
    for last, form in forms(view):
        if isinstance(form, str):
            yield last, form
        elif form.biases and any(Facts.of(view, context.to).counts_far(bias) for bias in form.biases):
            yield last, f"the bias of its scores grows with the position, and would be added in {context.to.spelling}"
        else:
            yield last, site_of(view, form, context.to, context.dims(view))


def forms(view: View) -> Iterator[tuple[OpId, AttentionForm | str]]:
    """Yield each attention that is written out, by its last op, as far as structure tells; or why it is not one."""
    for op in view.of_kinds(("Softmax",)):
        form = form_of(view, op)
        if form is not None:
            yield (op.id, form) if isinstance(form, str) else (form.last.id, form)
