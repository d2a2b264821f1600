"""Training: gradients as a graph transform, loss scale, optimizers, and the whole step as one graph.

TensorFlow's names for mixed precision are available under the same names.
"""

from __future__ import annotations

from amp_rewrite.lazy import lazy_exports

# `__init__.pyi` is the list of public names: type checkers read it, and so does this line.
__getattr__, __dir__, __all__ = lazy_exports(__name__)
