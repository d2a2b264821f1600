"""The training step: forward, backward and update in one graph, its file, its checkpoints and its trainer."""
