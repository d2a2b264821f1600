"""Fixtures of all tests in a browser."""

from support.browser import chromium, visit

__all__ = ["chromium", "visit"]
