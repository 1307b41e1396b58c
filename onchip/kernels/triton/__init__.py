"""Portable kernels in Triton: the whole contract, forward and backward, on any GPU it serves."""
