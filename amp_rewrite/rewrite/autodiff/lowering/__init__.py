"""The backward pass made possible: ops without a gradient rule become ops with one."""
