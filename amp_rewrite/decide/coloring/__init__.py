"""Coloring: lists, levels, kernel gate and safety rules become one decision per type variable."""
