"""Vector-Jacobian products: how a gradient passes each operator, one row per operator, by family."""
