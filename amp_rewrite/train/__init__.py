"""Training: gradients as a graph transform, loss scaling, optimizers, and the whole step as one graph.

TensorFlow's functions and classes for mixed precision are here under their own names.
"""

from __future__ import annotations

from amp_rewrite.lazy import lazy_exports

# `__init__.pyi` lists the public names, both for type checkers and for this line.
__getattr__, __dir__, __all__ = lazy_exports(__name__)
