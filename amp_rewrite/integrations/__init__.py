"""A step of other tools, see docs/how-to/pipelines.md. Each module needs the tool of its name."""
