"""Small models after real code, each with the principle that it tries, beside two reference conversions."""
