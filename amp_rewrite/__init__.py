"""Automatic mixed precision for ONNX: `convert` a float32 model; its `Report` says why each op has its type."""

from __future__ import annotations

from amp_rewrite.lazy import lazy_exports

# `__init__.pyi` lists the public names, for type checkers and for this line.
__getattr__, __dir__, __all__ = lazy_exports(__name__)
