"""FlashAttention kernels for Hopper in Gluon. `entry` answers dispatch without importing Triton."""
