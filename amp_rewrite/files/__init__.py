"""ONNX files: reading, external data, and atomic writing."""
