"""The update of a training step: optimizers, and their arithmetic as graph nodes."""
