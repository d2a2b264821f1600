"""What numbers need on top of the lists: the rules that hold ops in float32 or together."""
