"""Contrib fusion: replace standard ops with onnxruntime's own operators."""
