"""Pages: what results hold, drawn as one self-contained HTML file."""
