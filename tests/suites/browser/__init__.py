"""HTML pages in a headless Chromium."""
