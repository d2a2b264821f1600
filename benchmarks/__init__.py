"""Benchmarks of amp-rewrite; `python benchmarks/run.py` lists and runs them."""
