"""Hopper kernels in Gluon; `entry` answers dispatch without importing Triton."""
