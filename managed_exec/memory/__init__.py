"""Where the bytes of managed tensors are, and how room is made for more."""
