"""Measurements from runs of models: input data, ranges, errors and verdicts."""
