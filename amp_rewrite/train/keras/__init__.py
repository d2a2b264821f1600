"""The API of TensorFlow and Keras: variables, stateful optimizers, networks, losses, tapes, loss scale optimizer."""
