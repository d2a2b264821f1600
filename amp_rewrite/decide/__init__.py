"""Decisions: the type of each op with its reason, and the places of Casts."""
