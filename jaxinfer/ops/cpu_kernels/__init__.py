"""CPU kernels that are faster than XLA's."""
