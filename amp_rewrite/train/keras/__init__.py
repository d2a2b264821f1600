"""The TensorFlow API: variables, optimizers with state, networks with losses and tapes, the loss scale optimizer."""
