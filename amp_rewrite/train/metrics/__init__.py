"""Metrics of predictions over whole data, for `evaluate` and the validation of `fit`."""
