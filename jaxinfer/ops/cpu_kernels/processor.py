"""What LLVM knows of this machine's processor, up to the instructions that XLA may use as well."""

import os
from collections.abc import Mapping
from typing import Any

# XLA's names (its flag xla_cpu_max_isa), the least first, and what LLVM's features begin with that each leaves out. It
# leaves out what those after it do too.
_LEFT_OUT = {
    "sse4_2": ("avx", "f16c", "vpclmulqdq", "vaes"),
    "avx": ("avx2", "fma"),
    "avx2": ("avx512", "evex512"),
    "avx512": ("avx512vnni",),
    "avx512_vnni": ("avx512bf16",),
    "avx512_bf16": ("amx",),
    "amx": ("amx-fp16",),
}
_FLAG = "--xla_cpu_max_isa="


def host_features() -> Any:
    """Return LLVM's features of this processor, without those that ``XLA_FLAGS`` leaves out.

    So one setting holds for all code of a process, as where machines of several kinds are to agree in every bit.
    """
    from llvmlite import binding as llvm

    features = llvm.get_host_cpu_features()
    limits = [each.removeprefix(_FLAG) for each in os.environ.get("XLA_FLAGS", "").split() if each.startswith(_FLAG)]
    for name in left_out(limits[-1] if limits else "", features):
        features[name] = False
    return features


def left_out(limit: str, features: Mapping[str, bool]) -> list[str]:
    """Return the features that a limit leaves out: one of XLA's names; any other leaves out nothing."""
    names = list(_LEFT_OUT)
    if limit.lower() not in names:
        return []
    beginnings = [each for name in names[names.index(limit.lower()) :] for each in _LEFT_OUT[name]]
    return [name for name in features if name.startswith(tuple(beginnings))]
