"""The backward pass: append the gradients of a model to it, as standard ONNX ops."""
