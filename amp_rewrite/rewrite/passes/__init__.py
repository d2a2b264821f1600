"""Canonicalization passes that run before coloring."""
