"""The read-only graph: schemas, nodes, types, shapes, and their index."""
