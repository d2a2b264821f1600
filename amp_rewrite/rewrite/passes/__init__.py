"""Canonicalization passes, run before coloring."""
