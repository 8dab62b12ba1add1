"""Products of rows with the low-rank pair of matrices of their own adapter."""

from pallas_kernels.low_rank.op import add_up, fit_rows, project_down

__all__ = ["add_up", "fit_rows", "project_down"]
