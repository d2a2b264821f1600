"""Preparation of the backward pass: rewrite ops without a gradient rule as ops with one."""
