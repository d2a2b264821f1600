"""Safety rules: ops that must stay float32 whatever the lists say. Each rule is a record with its models."""
