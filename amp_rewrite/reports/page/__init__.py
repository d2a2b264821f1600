"""Pages: results drawn as one self-contained HTML file."""
