"""Preparation of the backward pass: replace ops without a gradient rule by ops with one."""
