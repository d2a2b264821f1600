"""Small models whose parts need float32: states that are fed back, raw inputs, recursions, front ends, sums, places."""
