"""Optimizers: one formula each, computed by numpy or written into a graph.

A formula is generic over an `Arithmetic`: `NUMPY`, and `graph.NODES` for nodes. Both do the same float32 operations
in the same order, so host and graph agree bit by bit; reductions (clipping by a norm) agree up to the order of
summation. All hyperparameters but the learning rate are constants of the graph.

Names and defaults are those of Keras in TensorFlow 2.1 to 2.3, except where a docstring states otherwise.
"""

from __future__ import annotations

from amp_rewrite.lazy import lazy_exports

# `__init__.pyi` is the list of public names: type checkers read it, and so does this line.
__getattr__, __dir__, __all__ = lazy_exports(__name__)
