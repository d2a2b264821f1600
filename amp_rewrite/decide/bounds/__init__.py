"""Bounds that are proofs: intervals of all float values, from weights alone. See docs/concepts/bounds.md."""
