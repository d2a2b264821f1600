"""Models from other tools: parameters as inputs, gradients already computed, training operators of the standard."""
