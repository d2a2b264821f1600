"""The TensorFlow API: variables, optimizers with state, and the loss scale optimizer."""
