"""Tests and measurements on an NVIDIA GPU."""
