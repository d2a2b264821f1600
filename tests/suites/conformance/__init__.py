"""The ONNX standard's test models, converted, run and judged."""
