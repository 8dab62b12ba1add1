"""Converted parameters that are kept from one process to the next, in a file that every process maps.

Dequantizing a GGUF file takes many times as long as mapping what comes of it. A file's name says which checkpoint it is
and how its parameters are laid out; its head, where each parameter stands, and from which bytes and by which code it
was made. Where those differ now, the parameters are made anew and replaced.
"""

import hashlib
import json
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxinfer.checkpoint.source import Checkpoint
from jaxinfer.kept.conditions import conditions, difference
from jaxinfer.kept.folder import KeptFolder, NotKept
from jaxinfer.kept.spelling import digest, spell
from jaxinfer.models.fingerprint import fingerprint
from jaxinfer.notation import Params
from jaxinfer.ops.few_bits.formats import format_from
from jaxinfer.ops.few_bits.panels import PanelArray
from jaxinfer.ops.few_bits.quantized_array import QuantizedArray

# Beside the fields of a form: of weights that lie in panels, their outputs, and whether they draft.
_PANELS = "panels"
# Before the number of each item of what is a tuple, not a dictionary.
_ITEM = "item "
_FORM = "jaxinfer parameters 5"
# A page: JAX's CPU backend takes numbers over where they are if they begin at a multiple of 64 bytes.
_ALIGNMENT = 4096
# The name of threads that write.
WRITER = "jaxinfer-keep"
_DIGEST_LETTERS, _LENGTH_LETTERS = 64, 16


@dataclass
class KeptParams:
    """Parameters in a folder; ``notes`` say what was mapped, and why something was not read or not written."""

    folder: KeptFolder
    notes: list[str] = field(default_factory=list)
    _writing: threading.Thread | None = None

    def load(self, checkpoint: Checkpoint, layout: Any, convert: Callable[[], Params]) -> Params:
        """Return what ``convert`` does, out of a file where it is kept; ``layout`` is all that decides its form.

        Only of checkpoints whose files need converting: others are read as fast where they are.
        """
        if not checkpoint.converted_files or jax.devices()[0].platform != "cpu":
            return convert()
        try:
            named = digest(*(str(path.absolute()) for path in checkpoint.converted_files), spell(layout))
            states = repr([_state(path) for path in checkpoint.converted_files])
        except (NotKept, OSError) as reason:
            self.notes.append(f"not kept: {reason}")
            return convert()
        return self._find(named, {"checkpoint": states}, convert)

    def load_made(self, params: Params, layout: Callable[[], Any], make: Callable[[], Params]) -> Params:
        """Return what ``make`` does of parameters, out of a file where it is kept; ``layout`` gives all else it is of.

        Only for what decides no token: parameters go by their fingerprint, which reads a part of them.
        """
        if jax.devices()[0].platform != "cpu":
            return make()
        try:
            named = digest("made of", fingerprint(params), spell(layout()))
        except (NotKept, OSError) as reason:
            self.notes.append(f"not kept: {reason}")
            return make()
        return self._find(named, {}, make)

    def _find(self, named: str, source: Mapping[str, str], convert: Callable[[], Params]) -> Params:
        name, made_of = f"{named}.parameters", {**source, **conditions()}
        try:
            data = self.folder.map(name)
            if data is not None:
                params = params_of(data, made_of)
                self.notes.append(f"{len(data) >> 20} MB mapped")
                return params
        except NotKept as reason:
            self.notes.append(f"not read: {reason}")
        params = convert()
        # The first text need not wait for the disk, though the process's end does.
        self._writing = threading.Thread(target=self._write, args=(name, params, made_of), name=WRITER)
        self._writing.start()
        return params

    def wait(self) -> None:
        """Wait until all is written."""
        if self._writing is not None:
            self._writing.join()

    def _write(self, name: str, params: Params, made_of: Mapping[str, str]) -> None:
        try:
            write_params(self.folder, name, params, made_of)
        except NotKept as reason:
            self.notes.append(f"not kept: {reason}")


def write_params(folder: KeptFolder, name: str, params: Params, made_of: Mapping[str, str]) -> None:
    """Write parameters to a file, with what they were made of; raises NotKept that says why it was not written."""
    parts = [(path, form, np.asarray(leaf)) for path, form, leaf in _walk(params)]
    head, ends = _lay_out(parts, made_of)
    folder.write(name, _pieces(head, [array for *_, array in parts], ends), ends[-1])


def _state(path: Path) -> tuple[int, int, int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns, found.st_ino, found.st_dev


def _walk(
    node: Mapping[str, Any], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], dict[str, Any] | None, Any]]:
    """Yield the path of every array; of a quantized array's, its name too, and the array's form and panels."""
    for key, value in node.items():
        if isinstance(value, Mapping | tuple) and not value:
            raise NotKept(f"{'.'.join((*path, key))} is empty")
        if isinstance(value, tuple):
            yield from _walk({f"{_ITEM}{index}": item for index, item in enumerate(value)}, (*path, key))
        elif isinstance(value, Mapping):
            yield from _walk(value, (*path, key))
        elif isinstance(value, QuantizedArray):
            if type(value) not in (QuantizedArray, PanelArray):
                raise NotKept(f"{'.'.join((*path, key))} lies by columns")
            panels = [value.num_outputs, value.drafts] if isinstance(value, PanelArray) else None
            form = {**asdict(value.form), _PANELS: panels}
            yield from (((*path, key, name), form, part) for name, part in zip(value.form.part_names, value.matrix))
        else:
            yield (*path, key), None, value


def _lay_out(
    parts: list[tuple[tuple[str, ...], dict[str, Any] | None, np.ndarray]], made_of: Mapping[str, str]
) -> tuple[bytes, list[int]]:
    """Return the head of a file, and where it and each array after it end, filled up to whole pages."""
    places, at = [], 0
    for path, form, array in parts:
        places.append({"path": path, "form": form, "dtype": array.dtype.name, "shape": array.shape, "at": at})
        at += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    body = json.dumps({"form": _FORM, "made of": made_of, "num_bytes": at, "arrays": places}).encode()
    head = f"{hashlib.sha256(body).hexdigest()}{len(body):>{_LENGTH_LETTERS}}".encode() + body
    start = -(-len(head) // _ALIGNMENT) * _ALIGNMENT
    return head, [start, *(start + place["at"] for place in places[1:]), start + at]


def _pieces(head: bytes, arrays: list[np.ndarray], ends: list[int]) -> Iterator[Any]:
    at = 0
    for piece, end in zip((np.frombuffer(head, np.uint8), *arrays), ends, strict=True):
        flat = np.ascontiguousarray(piece).reshape(-1).view(np.uint8)
        yield flat
        yield bytes(end - at - flat.nbytes)
        at = end


def params_of(data: Any, made_of: Mapping[str, str]) -> Params:
    """Return the parameters of a file as JAX arrays in it; raises NotKept if they were made of other things."""
    first = _DIGEST_LETTERS + _LENGTH_LETTERS
    try:
        body = data[first : first + int(data[_DIGEST_LETTERS:first])]
        intact = hashlib.sha256(body).hexdigest().encode() == data[:_DIGEST_LETTERS]
        head = json.loads(body) if intact else None
    except ValueError:
        head = None
    if not isinstance(head, dict) or head.get("form") != _FORM:
        raise NotKept("the file is damaged or of another version")
    if (changed := difference(head["made of"], made_of)) is not None:
        raise NotKept(f"made under other conditions ({changed})")
    start = -(-(first + len(body)) // _ALIGNMENT) * _ALIGNMENT
    if start + head["num_bytes"] != len(data):
        raise NotKept("the file is cut off")
    params: Params = {}
    quantized: dict[tuple[str, ...], dict[str, Any]] = {}
    for place in head["arrays"]:
        shape, dtype = tuple(place["shape"]), np.dtype(place["dtype"])
        array = np.frombuffer(data, dtype, math.prod(shape), start + place["at"]).reshape(shape)
        *folders, last = place["path"]
        node = reduce(lambda node, key: node.setdefault(key, {}), folders, params)
        node[last] = jax.device_put(array)
        if place["form"] is not None:
            quantized[tuple(folders)] = place["form"]
    for (*folders, last), fields in quantized.items():
        node = reduce(getitem, folders, params)
        panels = fields.pop(_PANELS)
        form = format_from(fields)
        parts = [node[last][name] for name in form.part_names]
        node[last] = QuantizedArray.of(form, parts) if panels is None else PanelArray.of_panels(form, parts, *panels)
    return _with_tuples(params)


def _with_tuples(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    made = {key: _with_tuples(value) for key, value in node.items()}
    return tuple(made.values()) if made and all(key.startswith(_ITEM) for key in made) else made
