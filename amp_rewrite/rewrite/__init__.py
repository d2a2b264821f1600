"""Transforms of models: passes, operator fusion, applying a plan, checking the result, emulation, gradients."""
