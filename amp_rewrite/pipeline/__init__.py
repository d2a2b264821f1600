"""The pipeline: draft, convert, and convert again with pins until the outputs agree."""
