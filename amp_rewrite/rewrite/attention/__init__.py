"""Attention fusion: recognize written-out scaled dot-product attention and replace it with one op."""
