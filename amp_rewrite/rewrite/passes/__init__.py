"""Canonicalization passes, which run before coloring."""
