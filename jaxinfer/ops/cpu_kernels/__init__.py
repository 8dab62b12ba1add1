"""CPU kernels: faster than XLA's for few rows, and a row's results have the same bits in any company."""
