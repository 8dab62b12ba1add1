"""Converts any checkpoint to this library's own folder: config, tokenizer, and weights in Orbax's format."""

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from jaxinfer.checkpoint.first_layers import first_layers
from jaxinfer.checkpoint.load import check_tensors
from jaxinfer.checkpoint.new_folder import check_target, claimed, new_folder, staging_of
from jaxinfer.checkpoint.open import open_checkpoint
from jaxinfer.checkpoint.orbax.layout import CONFIG, GGUF_METADATA, MARKER, WEIGHTS
from jaxinfer.checkpoint.orbax.marker import Marker, describe_marker
from jaxinfer.checkpoint.orbax.parts import TensorParts
from jaxinfer.checkpoint.source import Checkpoint, QuantizedSource, StoredForm, TypedTensorSource
from jaxinfer.errors import InvalidOption, JaxinferError, WriteFailed
from jaxinfer.models.decoder import abstract_params
from jaxinfer.models.families.registry import family_of
from jaxinfer.ops.backend import DTYPES, choose_backend

FOLDER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    "vocab.json",
    "merges.txt",
)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# How a tensor is written: as plain numbers, or in few bits.
_Kind = np.dtype | StoredForm
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.EMFILE, errno.ENAMETOOLONG)


def convert(
    model: str | Path,
    destination: str | Path,
    *,
    dtype: str | None = None,
    overwrite: bool = False,
    revision: str | None = None,
    token: str | None = None,
    adapter: str | Path | None = None,
    layers: int | None = None,
    notice: Callable[[str], None] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write ``model`` to the folder ``destination``, which loads as the model does; return the folder.

    Tensors keep their stored dtype, those in few bits their form, and a GGUF file's blocks become float32, unless
    ``dtype`` sets one dtype for all.
    ``adapter`` is a folder that PEFT saved a LoRA adapter in, here or on the hub (`checkpoint.adapters.place`), and is
    added to the weights; ``layers`` are how many of the first layers to write, with the final norm and the output
    matrix (None: all).
    ``destination`` appears only when it is complete; ``overwrite`` then replaces a folder that this function wrote.
    ``notice`` receives lines for the user, ``progress`` bytes done and in total. Raises subclasses of JaxinferError,
    and :class:`WriteFailed` if the disk is full.
    """
    if dtype is not None and dtype not in DTYPES:
        raise InvalidOption(f"unknown dtype {dtype!r}; use one of {', '.join(DTYPES)}")
    target = check_destination(destination, overwrite)
    checkpoint = open_checkpoint(model, revision=revision, token=token, notice=notice, progress=progress)
    keep_source(checkpoint.origin, target)
    if adapter is not None:
        # Imported here: few merge.
        from jaxinfer.checkpoint.adapters.merged import merge_into

        checkpoint = merge_into(checkpoint, adapter, token, notice)
    checkpoint = first_layers(checkpoint, layers)
    kinds = _choose_kinds(checkpoint, None if dtype is None else np.dtype(dtype), notice)
    return _write_new(target, overwrite, checkpoint, kinds, progress)


def save(
    checkpoint: Checkpoint,
    destination: str | Path,
    *,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write a loaded model's checkpoint as `convert` does, in the model's dtype."""
    target = check_destination(destination, overwrite)
    keep_source(checkpoint.origin, target)
    return _write_new(target, overwrite, checkpoint, _choose_kinds(checkpoint, None, None), progress)


def check_destination(destination: str | Path, overwrite: bool) -> Path:
    """Return the folder that is to be written; raise InvalidOption if it cannot be."""
    target = Path(os.path.realpath(Path(destination).expanduser()))
    check_target(target, MARKER if overwrite else None)
    return target


@contextmanager
def claimed_destination(target: Path, overwrite: bool) -> Iterator[None]:
    """Keep other processes from writing a folder while this one makes what it will `save` there.

    Raises InvalidOption if another process writes it, and WriteFailed if nothing can be written beside it.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(claimed(target, MARKER if overwrite else None))
        except OSError as error:
            raise _explain(error, target) from None
        yield


def _write_new(
    target: Path,
    overwrite: bool,
    checkpoint: Checkpoint,
    kinds: Mapping[str, _Kind],
    progress: Callable[[int, int], None] | None,
) -> Path:
    try:
        with new_folder(target, MARKER if overwrite else None) as folder:
            _write(folder, checkpoint, kinds, progress)
    except (JaxinferError, MemoryError):
        raise
    except Exception as error:  # TensorStore reports disk errors as several classes
        raise _explain(error, target) from None
    return target


def _write(
    folder: Path,
    checkpoint: Checkpoint,
    kinds: Mapping[str, _Kind],
    progress: Callable[[int, int], None] | None,
) -> None:
    # Imported here: Orbax takes most of a second to import, and a user's mistake should be reported before that.
    from jaxinfer.checkpoint.orbax.writer import write_tensors

    source = _write_tokenizer(folder, checkpoint)
    folded = checkpoint.folded
    factors = {} if folded is None or folded.factors is None else folded.factors
    forms = {name: kind for name, kind in kinds.items() if isinstance(kind, StoredForm)}
    parts = TensorParts(checkpoint.tensors, forms, factors)
    dtypes = {name: kind for name, kind in kinds.items() if not isinstance(kind, StoredForm)} | parts.dtypes()
    tensors = write_tensors(folder / WEIGHTS, parts, dtypes, progress)
    _write_json(folder / CONFIG, checkpoint.config)
    # Take the digest of the config as it will be read back: JSON turns tuples into lists.
    config = json.loads((folder / CONFIG).read_bytes())
    rounded_from = checkpoint.rounded_from if parts.forms else None
    kept = None if folded is not None and folded.factors is None else tuple(factors)
    marker = Marker(source, tensors, parts.forms, rounded_from, kept)
    _write_json(folder / MARKER, describe_marker(marker, config))


def _choose_kinds(
    checkpoint: Checkpoint, dtype: np.dtype | None, notice: Callable[[str], None] | None
) -> dict[str, _Kind]:
    family = family_of(checkpoint.config)
    config = family.translate(checkpoint.config)
    names = family.tensor_names(config)
    spare = check_tensors(checkpoint, names, abstract_params(config, choose_backend("float32", "cpu")))
    ignored = re.compile("|".join(f"(?:{pattern})" for pattern in names.ignored) or r"(?!)")
    left_out = spare | checkpoint.left_out
    wanted = [name for name in checkpoint.tensors.shapes() if name not in left_out and not ignored.fullmatch(name)]
    if dtype is not None:
        return dict.fromkeys(wanted, dtype)
    source = checkpoint.tensors
    forms = source.forms() if isinstance(source, QuantizedSource) else {}
    typed = source.stored_dtype if isinstance(source, TypedTensorSource) else lambda name: None
    kinds = {name: forms.get(name) or typed(name) for name in wanted}
    if notice is not None and (unpacked := sum(kind is None for kind in kinds.values())):
        notice(f"{checkpoint.origin}: {unpacked} quantised tensors become float32; --dtype chooses another")
    return {name: np.dtype(np.float32) if kind is None else kind for name, kind in kinds.items()}


def _write_tokenizer(folder: Path, checkpoint: Checkpoint) -> str:
    """Copy the tokenizer's files; return the checkpoint's format."""
    if checkpoint.gguf_metadata is not None:
        kept = {
            key: value
            for key, value in checkpoint.gguf_metadata.items()
            if key == "general.architecture" or key.startswith("tokenizer.")
        }
        _write_json(folder / GGUF_METADATA, kept)
        return "gguf"
    if checkpoint.llama2c_file is not None:
        names = (f"tok{checkpoint.config['vocab_size']}.bin", "tokenizer.bin", "tokenizer.model")
        copy_files(checkpoint.llama2c_file.parent, folder, names)
        return "llama2c"
    if checkpoint.folder is not None:
        copy_files(checkpoint.folder, folder)
    return "hugging_face"


def copy_files(source: Path, folder: Path, patterns: tuple[str, ...] = FOLDER_FILES) -> None:
    """Copy a folder's files that match; by default a Hugging Face folder's files other than its weights."""
    for path in (path for pattern in patterns for path in sorted(source.glob(pattern)) if path.is_file()):
        place = folder / path.relative_to(source)
        place.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, place)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    # GGUF metadata and translated configs may hold NumPy values.
    text = json.dumps(dict(content), ensure_ascii=False, default=lambda value: value.tolist())
    path.write_text(text, encoding="utf-8")


def keep_source(origin: str, target: Path) -> None:
    """Raise InvalidOption if a folder that is to be written is, or holds, what it would be written from."""
    source = Path(os.path.realpath(Path(origin).expanduser()))
    if target == source or target in source.parents:
        raise InvalidOption(f"{target}: holds the model that is to be converted; give another destination")


def _explain(error: Exception, target: Path) -> WriteFailed:
    text = " ".join(str(error).split())
    found, name = (error.errno, str(error.filename or "")) if isinstance(error, OSError) else (None, "")
    # For a file in the staging folder, name the destination: the user knows only that one.
    place = name if name and not Path(name).is_relative_to(staging_of(target)) else target
    for number in (*_FULL, *_REFUSED):
        if number == found or (found is None and os.strerror(number) in text):
            mend = "free some space" if number in _FULL else "check its permissions and limits"
            return WriteFailed(f"{place}: {os.strerror(number)}; {mend} or give another destination")
    return WriteFailed(f"{place}: cannot be written ({text.partition(' [')[0][:200]}); give another destination")
