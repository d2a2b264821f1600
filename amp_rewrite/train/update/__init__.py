"""From gradients to new state: loss scales, optimizers, and both as graph nodes."""
