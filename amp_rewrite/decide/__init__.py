"""Decisions: which ops stay float32, which become low, where the Casts go, and why."""
