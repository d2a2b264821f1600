"""The colors: lists, levels, gate and safety rules become one decision per type variable."""
