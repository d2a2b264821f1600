"""Models from other tools: export from PyTorch and Keras, and graphs with their own backward pass."""
