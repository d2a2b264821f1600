"""Running models on onnxruntime: how they are handed over, bound to a device, and what their values are."""
