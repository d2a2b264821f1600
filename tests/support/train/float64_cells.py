"""LSTM, GRU and RNN in float64, step by step as onnx writes them down; onnx's reference has one direction only."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from onnx.reference.op_run import OpRun

Array = np.ndarray
FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    "Sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "Tanh": np.tanh,
    "Relu": lambda x: np.maximum(x, 0),
    "Softsign": lambda x: x / (1 + np.abs(x)),
    "HardSigmoid": lambda x: np.clip(0.2 * x + 0.5, 0, 1),
}


def lstm(x: Array, h: Array, c: Array, w: Array, r: Array, wb: Array, rb: Array, p: Array, a: Any, k: Any) -> Any:
    f, g, end = a
    wi, wo, wf, wc = np.split(w, 4)
    ri, ro, rf, rc = np.split(r, 4)
    bi, bo, bf, bc = np.split(wb + rb, 4)
    pi, po, pf = np.split(p, 3)
    i = f(k.clip(x @ wi.T + h @ ri.T + pi * c + bi))
    forget = 1 - i if k.input_forget else f(k.clip(x @ wf.T + h @ rf.T + pf * c + bf))
    c = forget * c + i * g(k.clip(x @ wc.T + h @ rc.T + bc))
    o = f(k.clip(x @ wo.T + h @ ro.T + po * c + bo))
    return o * end(c), c


def gru(x: Array, h: Array, c: Array, w: Array, r: Array, wb: Array, rb: Array, p: Array, a: Any, k: Any) -> Any:
    f, g = a
    wz, wr, wh = np.split(w, 3)
    rz, rr, rh = np.split(r, 3)
    (wbz, wbr, wbh), (rbz, rbr, rbh) = np.split(wb, 3), np.split(rb, 3)
    z = f(k.clip(x @ wz.T + h @ rz.T + wbz + rbz))
    reset = f(k.clip(x @ wr.T + h @ rr.T + wbr + rbr))
    if k.linear_before_reset:
        new = g(k.clip(x @ wh.T + reset * (h @ rh.T + rbh) + wbh))
    else:
        new = g(k.clip(x @ wh.T + (reset * h) @ rh.T + rbh + wbh))
    return (1 - z) * new + z * h, c


def rnn(x: Array, h: Array, c: Array, w: Array, r: Array, wb: Array, rb: Array, p: Array, a: Any, k: Any) -> Any:
    return a[0](k.clip(x @ w.T + h @ r.T + wb + rb)), c


class _Layer(OpRun):
    """A layer of some cell: its formula, gates, and activations where none are stated."""

    op_domain = ""
    formula: Any
    gates: int
    usual: Sequence[str]

    def layer(self, x: Array, w: Array, r: Array, given: Sequence[Array | None], words: dict[str, Any]) -> Any:
        bias, lengths, h0, c0, p = given
        bound = words.get("clip") or math.inf
        kind = SimpleNamespace(**{**words, "clip": lambda a: np.clip(a, -bound, bound)})
        batch_first, direction = words.get("layout"), words.get("direction") or "forward"
        x = x.swapaxes(0, 1) if batch_first else x
        steps, batch, _ = x.shape
        count, hidden = len(w), r.shape[-1]
        bias = np.zeros((count, 2 * self.gates * hidden)) if bias is None else bias
        p = np.zeros((count, 3 * hidden)) if p is None else p
        lengths = np.full(batch, steps) if lengths is None else lengths
        states = [np.zeros((count, batch, hidden)) if s is None else s for s in (h0, c0)]
        turned = bool(batch_first)
        states = [s.swapaxes(0, 1) if turned and g is not None else s for s, g in zip(states, (h0, c0), strict=True)]
        names = [n.decode() if isinstance(n, bytes) else n for n in words.get("activations") or [*self.usual] * count]
        active = np.split(np.array([FUNCTIONS[n] for n in names], object), count)
        y = np.zeros((steps, count, batch, hidden))
        last = [np.zeros((count, batch, hidden)) for _ in "hc"]
        for d in range(count):
            order = range(steps)[:: -1 if direction == "reverse" or d else 1]
            for row in range(batch):
                h, c = states[0][d, row], states[1][d, row]
                for t in order:
                    if t < lengths[row]:
                        biases = np.split(bias[d], 2)
                        h, c = type(self).formula(x[t, row], h, c, w[d], r[d], *biases, p[d], active[d], kind)
                        y[t, d, row] = h
                last[0][d, row], last[1][d, row] = h, c
        if batch_first:
            return y.transpose(2, 0, 1, 3), *[s.swapaxes(0, 1) for s in last]
        return y, *last


class LSTM(_Layer):
    formula, gates, usual = staticmethod(lstm), 4, ("Sigmoid", "Tanh", "Tanh")

    def _run(self, x, w, r, b=None, lengths=None, h=None, c=None, p=None, **words):  # type: ignore[no-untyped-def]
        return self.layer(x, w, r, (b, lengths, h, c, p), words)


class GRU(_Layer):
    formula, gates, usual = staticmethod(gru), 3, ("Sigmoid", "Tanh")

    def _run(self, x, w, r, b=None, lengths=None, h=None, **words):  # type: ignore[no-untyped-def]
        return self.layer(x, w, r, (b, lengths, h, None, None), words)[:2]


class RNN(_Layer):
    formula, gates, usual = staticmethod(rnn), 1, ("Tanh",)

    def _run(self, x, w, r, b=None, lengths=None, h=None, **words):  # type: ignore[no-untyped-def]
        return self.layer(x, w, r, (b, lengths, h, None, None), words)[:2]


CELLS = [LSTM, GRU, RNN]
