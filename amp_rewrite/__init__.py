"""Automatic mixed precision for ONNX: `convert` a float32 model, and read the `Report` on the type of each op."""

from __future__ import annotations

from amp_rewrite.lazy import lazy_exports

# `__init__.pyi` lists the public names, for type checkers and for this line.
__getattr__, __dir__, __all__ = lazy_exports(__name__)
