"""Settings: policies, op lists, selectors and options, from keywords, files and variables."""
