"""The training step: one graph for the forward pass, backward pass and update, with checkpoints and a trainer."""
