"""Measurements that run models: input data, ranges, errors and verdicts."""
