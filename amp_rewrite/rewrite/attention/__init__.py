"""Attention fusion: recognize scaled dot-product attention and write it as one Attention op."""
