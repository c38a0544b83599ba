"""Tensor to payload and back, and the frame that carries a payload."""
