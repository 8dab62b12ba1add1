"""Products of rows with the kernels of the experts that they go to."""

from pallas_kernels.grouped_matmul.codes import Codes
from pallas_kernels.grouped_matmul.op import fit_rows, grouped_matmul

__all__ = ["Codes", "fit_rows", "grouped_matmul"]
