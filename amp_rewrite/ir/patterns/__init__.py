"""Patterns of ops for computations written out op by op by exporters."""
