"""What stands between this machine, or a model on it, and fast half precision, and the way out of each."""
