"""ONNX files: what is in them, where their bytes lie, how they are written."""
