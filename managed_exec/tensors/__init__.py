"""Tensors as the package sees them."""
