"""One computation on several ranks. torch.distributed is imported in this room alone."""
