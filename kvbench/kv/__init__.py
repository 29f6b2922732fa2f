"""The tensors of a transfer: capture a cache, remove the rotation, put it back, inject it."""
