"""Patterns of ops for computations that exporters write out op by op."""
