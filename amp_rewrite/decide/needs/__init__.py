"""Reasons for float32: facts of values, from inputs to outputs, and needs of readers, in the opposite direction."""
