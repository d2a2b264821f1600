"""What a model costs to run: latency, throughput, memory, and which op got slower."""
