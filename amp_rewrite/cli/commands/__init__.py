"""The commands: each parses its arguments, makes one library call, prints, and returns the exit code."""
