"""Attention kernels: one file per implementation; dispatch calls supports() of each."""
