"""Automatic mixed precision for ONNX: `convert` a float32 model; its `Report` says why each op has its type."""

from __future__ import annotations

from amp_rewrite.lazy import lazy_exports

# `__init__.pyi` is the list of public names: type checkers read it, and so does this line.
__getattr__, __dir__, __all__ = lazy_exports(__name__)
