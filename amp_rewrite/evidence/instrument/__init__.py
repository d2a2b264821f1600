"""Instrumentation: values of a model as outputs, for their ranges and errors."""
