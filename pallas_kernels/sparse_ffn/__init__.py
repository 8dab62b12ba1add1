"""Products that read the live blocks of a feed-forward layer's weights alone."""

from pallas_kernels.sparse_ffn.blocks import LiveBlocks, list_blocks
from pallas_kernels.sparse_ffn.op import fits, live_inputs, live_outputs

__all__ = ["LiveBlocks", "fits", "list_blocks", "live_inputs", "live_outputs"]
