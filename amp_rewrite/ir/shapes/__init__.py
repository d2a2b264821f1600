"""Shapes: numbers, and names for sizes, the same wherever they occur."""
