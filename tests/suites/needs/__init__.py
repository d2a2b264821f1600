"""Small models with parts that need float32: fed-back states, raw inputs, recursions, front ends, sums, positions."""
