"""Errors of the outputs, predicted by a backward pass over the rounding errors of the forward pass."""
