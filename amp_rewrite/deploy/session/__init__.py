"""Sessions that convert a model as they load it, their cache, and process-wide settings."""
