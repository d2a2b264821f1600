"""Instrumentation: graphs extended with nodes that record ranges and errors."""
