"""Models from other tools: export from PyTorch and Keras, and graphs that contain their own gradients."""
