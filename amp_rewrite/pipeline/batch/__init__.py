"""Conversion of many models: batches, and workers on this and other machines."""
