"""The headers of llama2.c's ``.bin`` files and the place of each tensor, for versions 0, 1 and 2.

Version 0 is seven integers and float32 weights; a negative vocabulary size means a separate classifier. Versions 1 and
2 begin with the magic ``ak42`` and pad their header to 256 bytes. Version 2 stores norms in float32, and every matrix
as int8 values followed by one float32 scale for each group of them.
"""

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from jaxinfer.errors import InvalidCheckpoint, UnsupportedModel

_MAGIC = (0x616B3432).to_bytes(4, "little")
_FIELDS = ("dim", "hidden_dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "seq_len")
_SIZES = struct.Struct("<7i")
_PADDED_BYTES = 256
_MOST_LAYERS = 1000  # the decoder's own limit: tensors are listed one by one

_NORMS = ("attention_norm", "ffn_norm", "norm")
_ATTENTION = ("wq", "wk", "wv", "wo")
_FFN = ("w1", "w2", "w3")
_LEGACY_ORDER = ("tokens", "attention_norm", *_ATTENTION, "ffn_norm", *_FFN, "norm", "cosines", "sines", "classifier")
_ORDER = (*_NORMS, "tokens", *_ATTENTION, *_FFN, "classifier")


@dataclass(frozen=True)
class Header:
    """The sizes at the start of a file, ``num_bytes`` long; ``group_size`` is None for float32 weights."""

    version: int
    dim: int
    hidden_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    seq_len: int
    shares_classifier: bool
    group_size: int | None
    num_bytes: int


@dataclass(frozen=True)
class Slot:
    """A tensor in the file: ``num_heads`` is set if its rows are interleaved within each head."""

    offset: int
    shape: tuple[int, ...]
    num_heads: int | None
    group_size: int | None


@dataclass(frozen=True)
class _Tensor:
    """A tensor of every layer or of the model; one without a name is skipped."""

    name: str | None
    shape: tuple[int, ...]
    num_heads: int | None = None

    @property
    def is_layered(self) -> bool:
        return self.name is not None and "{layer}" in self.name


def read_header(origin: str, data: bytes) -> Header:
    """Read a header from the file's first bytes; raises InvalidCheckpoint if no model can have its sizes.

    The sizes may still be too large for the file: call :func:`check_length` before using them.
    """
    is_legacy = data[:4] != _MAGIC
    if len(data) < (_SIZES.size if is_legacy else _PADDED_BYTES):
        raise _refuse(origin, f"it has only {len(data)} bytes, fewer than a header")
    version = 0 if is_legacy else struct.unpack_from("<i", data, 4)[0]
    if not is_legacy and version not in (1, 2):
        raise UnsupportedModel(f"{origin}: version {version} of llama2.c's ak42 files is not implemented; known: 1, 2")
    sizes: dict[str, int] = dict(zip(_FIELDS, _SIZES.unpack_from(data, 0 if is_legacy else 8)))
    flag = int(sizes["vocab_size"] > 0) if is_legacy else data[8 + _SIZES.size]
    if is_legacy:
        sizes["vocab_size"] = abs(sizes["vocab_size"])
    group_size = struct.unpack_from("<i", data, 9 + _SIZES.size)[0] if version == 2 else None
    _check_sizes(origin, sizes, flag, group_size)
    return Header(
        version=version,
        dim=sizes["dim"],
        hidden_dim=sizes["hidden_dim"],
        num_layers=sizes["n_layers"],
        num_heads=sizes["n_heads"],
        num_kv_heads=sizes["n_kv_heads"],
        vocab_size=sizes["vocab_size"],
        seq_len=sizes["seq_len"],
        shares_classifier=bool(flag),
        group_size=group_size,
        num_bytes=_SIZES.size if is_legacy else _PADDED_BYTES,
    )


def check_length(origin: str, header: Header, num_bytes: int) -> None:
    """Raise InvalidCheckpoint unless the file is exactly as long as its header says."""
    expected = header.num_bytes + sum(
        _tensor_bytes(tensor.shape, header.group_size) * (header.num_layers if tensor.is_layered else 1)
        for tensor in _tensors(header)
    )
    if num_bytes != expected:
        raise _refuse(origin, f"its header describes a file of {expected} bytes, but it has {num_bytes}")
    if header.num_layers > _MOST_LAYERS:
        raise UnsupportedModel(f"{origin}: n_layers {header.num_layers} is more than {_MOST_LAYERS}")


def place_tensors(header: Header) -> dict[str, Slot]:
    """Return the place of each tensor by its Hugging Face name; check the header's length first."""
    slots, offset = {}, header.num_bytes
    for tensor in _tensors(header):
        group_size = header.group_size if len(tensor.shape) > 1 else None
        for layer in range(header.num_layers if tensor.is_layered else 1):
            if tensor.name is not None:
                slots[tensor.name.format(layer=layer)] = Slot(offset, tensor.shape, tensor.num_heads, group_size)
            offset += _tensor_bytes(tensor.shape, header.group_size)
    return slots


def _check_sizes(origin: str, sizes: dict[str, int], flag: int, group_size: int | None) -> None:
    for name, value in sizes.items():
        if value <= 0:
            raise _refuse(origin, f"its header makes {name} {value}")
    dim, heads, kv_heads = sizes["dim"], sizes["n_heads"], sizes["n_kv_heads"]
    if dim % heads or dim // heads % 2:
        raise _refuse(origin, f"its header splits dim {dim} into {heads} heads, which are not even and whole")
    if heads % kv_heads:
        raise _refuse(origin, f"its header shares {kv_heads} key and value heads between {heads} heads")
    if flag not in (0, 1):
        raise _refuse(origin, f"its header's flag of a shared classifier is {flag}, not 0 or 1")
    if group_size is not None and (group_size <= 0 or dim % group_size):
        raise _refuse(origin, f"its header's group_size {group_size} does not divide dim {dim}")


def _refuse(origin: str, reason: str) -> InvalidCheckpoint:
    return InvalidCheckpoint(f"{origin}: not a llama2.c checkpoint, or damaged: {reason}; download or export it again")


def _tensors(header: Header) -> Iterator[_Tensor]:
    """Yield the tensors in the file's order; version 0's rotary tables are computed, so they have no name."""
    dim, hidden, vocab = header.dim, header.hidden_dim, header.vocab_size
    head_dim = dim // header.num_heads
    kv_dim = header.num_kv_heads * head_dim
    block = "model.layers.{layer}."
    table = _Tensor(None, (header.seq_len * (head_dim // 2),))
    tensors = {
        "tokens": _Tensor("model.embed_tokens.weight", (vocab, dim)),
        "attention_norm": _Tensor(f"{block}input_layernorm.weight", (dim,)),
        "ffn_norm": _Tensor(f"{block}post_attention_layernorm.weight", (dim,)),
        "norm": _Tensor("model.norm.weight", (dim,)),
        "wq": _Tensor(f"{block}self_attn.q_proj.weight", (dim, dim), header.num_heads),
        "wk": _Tensor(f"{block}self_attn.k_proj.weight", (kv_dim, dim), header.num_kv_heads),
        "wv": _Tensor(f"{block}self_attn.v_proj.weight", (kv_dim, dim)),
        "wo": _Tensor(f"{block}self_attn.o_proj.weight", (dim, dim)),
        "w1": _Tensor(f"{block}mlp.gate_proj.weight", (hidden, dim)),
        "w2": _Tensor(f"{block}mlp.down_proj.weight", (dim, hidden)),
        "w3": _Tensor(f"{block}mlp.up_proj.weight", (hidden, dim)),
        "cosines": table,
        "sines": table,
        "classifier": _Tensor("lm_head.weight", (vocab, dim)),
    }
    for part in _ORDER if header.version else _LEGACY_ORDER:
        if part != "classifier" or not header.shares_classifier:
            yield tensors[part]


def _tensor_bytes(shape: tuple[int, ...], group_size: int | None) -> int:
    size = math.prod(shape)
    return 4 * size if group_size is None or len(shape) == 1 else size + 4 * (size // group_size)
