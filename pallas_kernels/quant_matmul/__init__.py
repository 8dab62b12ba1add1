"""Matrix products with weights of 8 or 4 bits, dequantised on the chip."""

from pallas_kernels.quant_matmul.op import quant_matmul
from pallas_kernels.quant_matmul.quantize import quantize_int4, quantize_int8

__all__ = ["quant_matmul", "quantize_int4", "quantize_int8"]
