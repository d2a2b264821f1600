"""ONNX files: their content, the place of their bytes, and writing them."""
