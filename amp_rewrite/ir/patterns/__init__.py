"""Computations written out op by op by exporters, as tables of op patterns."""
