"""The commands, one module each: parse, make one library call, print, return the exit code."""
