"""Opens a checkpoint whose ``config.json`` has a ``quantization_config``."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jaxinfer.checkpoint.published.awq import read_awq
from jaxinfer.checkpoint.published.bitnet import read_bitnet
from jaxinfer.checkpoint.published.bitsandbytes import read_bitsandbytes
from jaxinfer.checkpoint.published.compressed_tensors import read_compressed_tensors
from jaxinfer.checkpoint.published.fp8 import read_fbgemm_fp8, read_fp8
from jaxinfer.checkpoint.published.gptq import read_gptq
from jaxinfer.checkpoint.published.mxfp4 import read_mxfp4
from jaxinfer.checkpoint.published.quantization_keys import QuantizationKeys
from jaxinfer.checkpoint.published.scheme import Scheme
from jaxinfer.checkpoint.published.tensors import PublishedTensors
from jaxinfer.checkpoint.published.torchao import read_torchao
from jaxinfer.checkpoint.source import Checkpoint, DescribedSource
from jaxinfer.errors import UnsupportedModel, shown

KEY = "quantization_config"
_METHODS: Mapping[str, Callable[[QuantizationKeys], Scheme]] = MappingProxyType(
    {
        "gptq": read_gptq,
        "awq": read_awq,
        "compressed-tensors": read_compressed_tensors,
        "fp8": read_fp8,
        "fbgemm_fp8": read_fbgemm_fp8,
        "bitsandbytes": read_bitsandbytes,
        "torchao": read_torchao,
        "mxfp4": read_mxfp4,
        "bitnet": read_bitnet,
    }
)


def open_published(folder: Path, config: Mapping[str, Any], weights: DescribedSource) -> Checkpoint:
    """Open a folder whose ``config.json`` has a ``quantization_config``; the checkpoint's config has none."""
    plain, scheme = read_scheme(config)
    assert scheme is not None
    tensors = PublishedTensors(str(folder), weights, scheme)
    return Checkpoint(
        str(folder),
        plain,
        tensors,
        folder=folder,
        converted_files=(folder / "config.json", *sorted(folder.glob("*.safetensors"))),
        quantized_by=scheme.name,
        notice=scheme.notice,
    )


def read_scheme(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], Scheme | None]:
    """Return a ``config.json`` without its ``quantization_config``, and how that stores weights; None if it is absent.

    Raises UnsupportedModel for a method or a key that is not known.
    """
    found = config.get(KEY)
    if found is None:
        return config, None
    if not isinstance(found, Mapping):
        raise UnsupportedModel(f"config.json: {KEY} = {shown(found)} is no object")
    method = found.get("quant_method")
    if method is None and any(found.get(f"load_in_{bits}bit") is True for bits in (4, 8)):
        method = "bitsandbytes"  # the first files do not say so
    read = _METHODS.get(method) if isinstance(method, str) else None
    if read is None:
        known = f"known methods are {', '.join(_METHODS)}"
        raise UnsupportedModel(f"config.json: {KEY}.quant_method = {shown(method)} is not supported: {known}")
    keys = QuantizationKeys(found, str(method), f"{KEY}.")
    keys.without_effect("quant_method")
    return {key: value for key, value in config.items() if key != KEY}, read(keys)
