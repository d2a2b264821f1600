"""Placement: the cheapest border between float16 and float32, found by a minimum cut."""
