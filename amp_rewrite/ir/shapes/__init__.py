"""Shapes: numbers, and names that stand for the same size wherever they occur."""
