"""The pipeline: one conversion, its check and repair, and batches of conversions."""
