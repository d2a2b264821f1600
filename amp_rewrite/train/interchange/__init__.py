"""Models from other tools: export from PyTorch and Keras, and graphs containing their own gradients."""
