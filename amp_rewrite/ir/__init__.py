"""The read-only graph: schemas, nodes, types, shapes, and the index over them."""
