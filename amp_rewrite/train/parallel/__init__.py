"""Data-parallel training: replicas, and a trainer that averages their gradients."""
