"""Columns of a table that lies by columns: the embeddings of tokens where a table is stored for products."""

from pallas_kernels.take_columns.kernel import LANES
from pallas_kernels.take_columns.op import take_columns

__all__ = ["LANES", "take_columns"]
