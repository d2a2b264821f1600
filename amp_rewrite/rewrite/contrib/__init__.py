"""Contrib fusion: onnxruntime's own operators from standard ones."""
