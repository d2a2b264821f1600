"""The Keras-shaped API: variables, optimizers with state, the loss-scale optimizer, the switch."""
