"""llama2.c's single-file checkpoints: float32 or groups of int8, read one tensor at a time."""

import math
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxinfer.checkpoint.hf_folder import refuse_pickle
from jaxinfer.checkpoint.llama2c.layout import Header, Slot, check_length, place_tensors, read_header
from jaxinfer.checkpoint.mapped_file import map_file
from jaxinfer.checkpoint.rotary_rows import half_split_places
from jaxinfer.checkpoint.source import Checkpoint
from jaxinfer.errors import InvalidCheckpoint

_SLAB_BYTES = 1 << 22
_HEADER_BYTES = 256
_ZIP = b"PK\x03\x04"


def open_llama2c(path: Path) -> Checkpoint:
    """Open a ``.bin`` file: its header is read and checked, its weights stay on disk.

    Raises :class:`CheckpointNotFound`; :class:`InvalidCheckpoint` for a damaged file, and for pickled weights, which
    have the same suffix; and :class:`UnsupportedModel` for a version that is not implemented.
    """
    origin = str(path)
    data = map_file(path)
    if _is_pickle(data[:4]):
        raise refuse_pickle(path)
    header = read_header(origin, data[:_HEADER_BYTES])
    check_length(origin, header, len(data))
    tensors = Llama2cTensors(origin, data, place_tensors(header), header.dim)
    return Checkpoint(origin, _translate_config(header), tensors, llama2c_file=path)


class Llama2cTensors:
    """The tensors of one ``.bin`` file under Hugging Face names, in Hugging Face's row order."""

    def __init__(self, origin: str, data: mmap.mmap | bytes, slots: Mapping[str, Slot], width: int):
        self._origin = origin
        self._data = data
        self._slots = slots
        self._width = width

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor; reads no weights."""
        return {name: slot.shape for name, slot in self._slots.items()}

    def stored_dtype(self, name: str) -> np.dtype | None:
        """Return float32, or None for a quantised tensor."""
        return np.dtype(np.float32) if self._slots[name].group_size is None else None

    def read(self, name: str, dtype: np.dtype) -> np.ndarray:
        """Read one tensor as ``dtype``, through float32; a read-only view of the file if that holds this dtype."""
        slot, dtype = self._slots[name], np.dtype(dtype)
        size = math.prod(slot.shape)
        stored = np.dtype(np.float32 if slot.group_size is None else np.int8)
        values = np.frombuffer(self._data, stored, size, slot.offset)
        if slot.num_heads is None and stored == dtype:
            return values.reshape(slot.shape)
        # Lines of the model's width are whole groups, and whole rows where rows are reordered.
        lines = values.reshape(-1, self._width)
        scales = None
        if slot.group_size is not None:
            scales = np.frombuffer(self._data, np.float32, size // slot.group_size, slot.offset + size)
            scales = scales.reshape(len(lines), -1)
        result = np.empty(slot.shape, dtype)
        flat = result.reshape(lines.shape)
        places = None if slot.num_heads is None else half_split_places(len(lines), slot.num_heads)
        step = max(1, _SLAB_BYTES // (4 * self._width))
        for start in range(0, len(lines), step):
            span = slice(start, start + step)
            # Weights may be infinite, NaN or too large for dtype; then the results are infinite or NaN.
            with np.errstate(all="ignore"):
                slab = lines[span] if scales is None else self._dequantize(lines[span], scales[span], name)
                flat[span if places is None else places[span]] = slab
        return result

    def _dequantize(self, lines: np.ndarray, scales: np.ndarray, name: str) -> np.ndarray:
        if not (scales >= 0).all():
            # The first exporter of version 2 wrote all scales at the end of the file, whose length is the same.
            raise InvalidCheckpoint(
                f"{self._origin}: tensor {name} has invalid scales: the file is damaged or "
                "of a very old exporter; export it again"
            )
        groups = lines.reshape(*scales.shape, -1)
        return (groups * scales[:, :, None]).reshape(lines.shape)


def _is_pickle(start: bytes) -> bool:
    """Tell pickles and PyTorch archives from headers: a plausible version 0 has third byte 0, a pickle never."""
    return start == _ZIP or (len(start) > 2 and start[0] == 0x80 and start[1] <= 5 and start[2] != 0)


def _translate_config(header: Header) -> dict[str, Any]:
    """Return the model's ``config.json``; values that the file lacks are fixed in llama2.c's code."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": header.vocab_size,
        "hidden_size": header.dim,
        "intermediate_size": header.hidden_dim,
        "num_hidden_layers": header.num_layers,
        "num_attention_heads": header.num_heads,
        "num_key_value_heads": header.num_kv_heads,
        "max_position_embeddings": header.seq_len,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": header.shares_classifier,
        "bos_token_id": 1,
        # Models trained by llama2.c end a story by starting the next one, so run.c stops at either token.
        "eos_token_id": [2, 1],
    }
