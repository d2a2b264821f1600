"""The training step: forward, backward and update in one graph, and the trainer that runs it."""
