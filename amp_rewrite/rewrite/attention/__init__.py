"""Attention fusion: recognize written-out scaled dot-product attention and replace it by one op."""
