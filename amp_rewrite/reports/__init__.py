"""What was done and why: reports, their text, and the difference of two."""
