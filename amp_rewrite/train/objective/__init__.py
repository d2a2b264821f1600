"""The training objective: the loss, its prediction and targets, and the parameters to train."""
