"""Sessions with conversion on loading, their cache, and process-wide settings."""
