"""Safety rules: what the numbers need beyond the lists. Each rule is a record with its models."""
