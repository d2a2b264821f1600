"""Settings: op lists, selectors and options, from keywords, files and environment variables."""
