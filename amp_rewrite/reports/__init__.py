"""Reports: data, text, and the difference of two."""
