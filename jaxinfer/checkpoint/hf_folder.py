"""Opens a folder in Hugging Face's layout: ``config.json`` and safetensors, in one file or in shards with an index."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxinfer.checkpoint.safetensors_file import CODES, SafetensorsFile
from jaxinfer.checkpoint.source import Checkpoint, DescribedSource
from jaxinfer.errors import CheckpointNotFound, InvalidCheckpoint

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
# No file system has longer names, and asking for one is an error.
_LONGEST_NAME = 255
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")


def open_hf_folder(folder: Path) -> Checkpoint:
    """Open a folder; reads ``config.json`` and the headers of the weights, maps the weights."""
    if not (folder / "config.json").is_file():
        if files := sorted(path for path in folder.iterdir() if path.suffix.lower() == ".gguf"):
            raise CheckpointNotFound(f"{folder}: holds GGUF files; give one of them, such as {files[0]}")
        raise CheckpointNotFound(f"{folder}: no config.json; point at the folder of the model's (or drafter's) files")
    config = read_json_object(folder / "config.json")
    is_quantized = config.get("quantization_config") is not None
    weights = _open_weights(folder, CODES if is_quantized else ())
    if not is_quantized:
        return Checkpoint(str(folder), config, weights, folder=folder)
    # Imported here: most checkpoints are not quantized.
    from jaxinfer.checkpoint.published.open import open_published

    return open_published(folder, config, weights)


def read_json_object(path: Path) -> dict[str, Any]:
    """Parse a JSON file that holds one object; raises :class:`InvalidCheckpoint` for anything else."""
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise InvalidCheckpoint(f"{path}: broken JSON ({error}); download the file again") from None
    except OSError as error:
        raise InvalidCheckpoint(f"{path}: cannot be read ({error.strerror})") from None
    if not isinstance(value, dict):
        raise InvalidCheckpoint(f"{path}: holds a JSON {type(value).__name__}, not an object; download the file again")
    return value


def refuse_pickle(path: Path, mend: str = "") -> InvalidCheckpoint:
    """Return the error for pickled weights, for the caller to raise, with a ``mend`` of its own if there is one."""
    mend = mend or "convert them to safetensors (save_pretrained in transformers does) or take a safetensors revision"
    return InvalidCheckpoint(
        f"{path}: pickled weights can run any code when they are opened, so they are refused; {mend}"
    )


class _Shards:
    """The union of several safetensors files; the index names the file of each tensor."""

    def __init__(self, files: Mapping[str, SafetensorsFile], weight_map: Mapping[str, str]):
        self._files = files
        self._weight_map = weight_map

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: self._files[shard].shapes()[name] for name, shard in self._weight_map.items()}

    def metadata(self) -> dict[str, str]:
        return {key: value for file in self._files.values() for key, value in file.metadata().items()}

    def stored_dtype(self, name: str) -> np.dtype:
        return self._files[self._weight_map[name]].stored_dtype(name)

    def read(self, name: str, dtype: np.dtype) -> np.ndarray:
        return self._files[self._weight_map[name]].read(name, dtype)


def _open_weights(folder: Path, codes: Iterable[str]) -> DescribedSource:
    if (folder / _SINGLE).is_file():
        return SafetensorsFile(folder / _SINGLE, codes)
    if (folder / _INDEX).is_file():
        return _open_shards(folder, codes)
    files = sorted(path for path in folder.iterdir() if path.is_file())
    if any(path.suffix == ".safetensors" for path in files):
        raise InvalidCheckpoint(f"{folder}: has neither {_SINGLE} nor {_INDEX}; fetch all files of the model")
    for path in files:
        if path.suffix in PICKLE_SUFFIXES:
            raise refuse_pickle(path)
    raise CheckpointNotFound(f"{folder}: no weights; expected {_SINGLE} or {_INDEX}")


def _open_shards(folder: Path, codes: Iterable[str]) -> _Shards:
    weight_map = read_json_object(folder / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise InvalidCheckpoint(f"{folder / _INDEX}: weight_map must map tensor names to file names")
    files: dict[str, SafetensorsFile] = {}
    for shard in sorted(set(weight_map.values())):
        # A shard must be a plain file name: an index must not point outside its folder.
        if shard in ("", ".", "..") or Path(shard).name != shard or "\0" in shard:
            raise InvalidCheckpoint(f"{folder / _INDEX}: {shard!r} is not a plain file name")
        if len(shard) > _LONGEST_NAME or not (folder / shard).is_file():
            raise InvalidCheckpoint(f"{folder / shard}: this shard is missing; fetch all files of the model")
        files[shard] = SafetensorsFile(folder / shard, codes)
    held = {shard: file.shapes().keys() for shard, file in files.items()}
    for name, shard in weight_map.items():
        if name not in held[shard]:
            raise InvalidCheckpoint(f"{folder / shard}: tensor {name} is in the index but not in the file")
    for shard, names in held.items():
        for name in names - weight_map.keys():
            raise InvalidCheckpoint(f"{folder / shard}: tensor {name} is not in {_INDEX}")
    return _Shards(files, weight_map)
