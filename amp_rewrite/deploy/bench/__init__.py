"""Benchmarks: latency, throughput, memory, and slower ops."""
