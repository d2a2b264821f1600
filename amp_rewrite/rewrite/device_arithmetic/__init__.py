"""Ops in the arithmetic of a device that adds up in the low type, written out in float32 ops that round."""
