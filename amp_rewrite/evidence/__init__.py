"""Measurements on data: input data, ranges, errors, verdicts. This wing runs models."""
