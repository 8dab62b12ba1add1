"""Kernels for the CPU that XLA's own do not reach."""
