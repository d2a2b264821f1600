"""Deployment: sessions of converted models, the doctor, and benchmarks."""
