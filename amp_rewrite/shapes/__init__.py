"""Shapes of values, as far as a model tells them: numbers, and names that stand for one size wherever they occur."""
