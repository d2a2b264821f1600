"""The models that the ONNX standard tests its operators with, converted, run and judged."""
