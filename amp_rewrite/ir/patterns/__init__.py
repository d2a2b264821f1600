"""Computations that exporters write out op by op, as tables of op patterns."""
