"""Many models: a repository, a batch, many machines."""
