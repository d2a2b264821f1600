"""The runtime: onnxruntime sessions, device buffers, kernel tables, GPUs."""
