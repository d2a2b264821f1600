"""The backward pass: gradients of a model as standard ONNX ops, appended to it."""
