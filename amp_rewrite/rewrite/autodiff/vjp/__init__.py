"""Vector-Jacobian products: the gradient rule of each operator, one module per family."""
