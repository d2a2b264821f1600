"""The training objective: the loss, the parameters it is minimised over, and layers in training mode."""
