"""Small models after real code, each testing a principle, compared with two reference conversions."""
