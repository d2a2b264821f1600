"""Benchmarks: latency, throughput, memory, and the ops that became slower."""
