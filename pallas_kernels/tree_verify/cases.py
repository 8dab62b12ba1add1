"""Real-size uses of tree_verify: trees of 16 to 128 drafts on published head layouts."""

import jax.numpy as jnp

from pallas_kernels.flash_decode.cases import (
    GEMMA_2_9B,
    LLAMA_2_7B,
    LLAMA_3_8B,
    LLAMA_3_70B,
    SMOLLM2_135M,
    decode_case,
)
from pallas_kernels.flash_decode.rivals import paged_rivals
from pallas_kernels.tree_verify.op import tree_verify

TOY_CASES = (
    decode_case("tree_verify", tree_verify, "toy M=9", (4, 2, 64), [3, 140], 9, 256, ancestors=True, dtype=jnp.float32),
)

CASES = (
    decode_case("tree_verify", tree_verify, "llama-3-8b B=8 M=16 S=2048", LLAMA_3_8B, [2032] * 8, 16, 2048,
                ancestors=True),
    decode_case("tree_verify", tree_verify, "llama-3-8b B=8 M=32 S=2048", LLAMA_3_8B, [2016] * 8, 32, 2048,
                ancestors=True, rivals=paged_rivals(8, 32, *LLAMA_3_8B, 2048, 2048)),
    decode_case("tree_verify", tree_verify, "llama-3-8b B=8 M=64 S=2048", LLAMA_3_8B, [1984] * 8, 64, 2048,
                ancestors=True, rivals=paged_rivals(8, 64, *LLAMA_3_8B, 2048, 2048)),
    decode_case("tree_verify", tree_verify, "llama-3-8b B=8 M=128 S=2048", LLAMA_3_8B, [1920] * 8, 128, 2048,
                ancestors=True),
    decode_case("tree_verify", tree_verify, "llama-2-7b B=1 M=64 S=2048", LLAMA_2_7B, [1984], 64, 2048,
                ancestors=True),
    decode_case("tree_verify", tree_verify, "llama-3-70b B=1 M=64 S=8192", LLAMA_3_70B, [8128], 64, 8192,
                ancestors=True),
    decode_case("tree_verify", tree_verify, "gemma-2-9b B=2 M=26 S=8192 window=4096", GEMMA_2_9B, [8166] * 2, 26, 8192,
                ancestors=True, window=4096, softcap=50.0, scale=0.0625),
    decode_case("tree_verify", tree_verify, "llama-3-8b B=1 M=64 S=32768 chain", LLAMA_3_8B, [32704], 64, 32768),
    decode_case("tree_verify", tree_verify, "smollm2-135m B=1 M=16 S=2048", SMOLLM2_135M, [2032], 16, 2048,
                ancestors=True),
)  # fmt: skip
