"""What is brought into its standard form before painting: what is one thing becomes one node."""
