"""Contrib fusion: replace standard ops by onnxruntime's own operators."""
