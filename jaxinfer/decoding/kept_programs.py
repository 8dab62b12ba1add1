"""Compiled programs that are kept from one process to the next, so that none is traced, lowered or compiled again.

A file's name says what the program is: the function with all that it closes over, and the types of its arguments. Its
first line says under what conditions it was compiled; where these differ now, it is compiled anew and replaced. Where
only this package's source does, and the program is lowered to the same text, what was compiled serves once more. The
CPU's own kernels that a program calls come with it, compiled.
"""

import hashlib
import json
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
from jax.experimental import serialize_executable

from jaxinfer.kept.conditions import SOURCE, compiler_conditions, difference, machine
from jaxinfer.kept.folder import KeptFolder, NotKept
from jaxinfer.kept.spelling import digest, spell
from jaxinfer.ops.cpu_kernels import machine_code

_FORM = "jaxinfer program 3"


@dataclass
class KeptPrograms:
    """Programs in a folder; ``notes`` say why some were not read or not written."""

    folder: KeptFolder
    notes: list[str] = field(default_factory=list)
    _outdated: dict[str, "_File"] = field(default_factory=dict)

    def name(self, function: Callable[..., Any], donated: tuple[int, ...], arguments: tuple[Any, ...]) -> str | None:
        """Return the file name of a program for arguments on this process's first device, None where it has none."""
        try:
            return f"{digest(*_identity(function, donated, arguments))}.program"
        except NotKept as reason:
            self._note("not kept", reason)
            return None

    def read(self, name: str, arguments: tuple[Any, ...]) -> Callable[..., Any] | None:
        """Return the program of a name, ready to be called; None where there is none, or none that serves."""
        try:
            content = self.folder.read(name)
            if content is None:
                return None
            file = _parse(content)
            changed = difference(file.conditions, compiler_conditions())
            if changed == SOURCE:
                self._outdated[name] = file
            if changed is not None:
                raise NotKept(f"compiled under other conditions ({changed})")
            return _load(file.content, arguments)
        except NotKept as reason:
            self._note("not read", reason)
            return None

    def read_lowered(self, name: str, lowered: Any, arguments: tuple[Any, ...]) -> Callable[..., Any] | None:
        """Return the program of a name that older source was lowered to, if it is the same, and keep it as today's."""
        file = self._outdated.pop(name, None)
        if file is None or file.text != _text(lowered):
            return None
        try:
            program = _load(file.content, arguments)
            self._write(name, file.text, pickle.loads(file.content)[:3])
            return program
        except NotKept as reason:
            self._note("not kept", reason)
            return None

    def write(self, name: str, lowered: Any, compiled: Any) -> None:
        """Keep a program."""
        try:
            self._write(name, _text(lowered), serialize_executable.serialize(compiled))
        except NotKept as reason:
            self._note("not kept", reason)
        except Exception as error:  # whatever cannot be written down: another backend, a type of somebody's
            self._note("not kept", NotKept(f"it cannot be written down ({type(error).__name__})"))

    def _write(self, name: str, text: str, serialized: tuple[Any, ...]) -> None:
        content = pickle.dumps((*serialized, machine_code.compiled_objects()))
        head = {
            "form": _FORM,
            "sha256": hashlib.sha256(content).hexdigest(),
            "text": text,
            "conditions": dict(compiler_conditions()),
        }
        line = json.dumps(head).encode() + b"\n"
        self.folder.write(name, [line, content], len(line) + len(content))

    def _note(self, what: str, reason: NotKept) -> None:
        note = f"{what}: {reason}"
        if note not in self.notes:
            self.notes.append(note)


def _identity(function: Callable[..., Any], donated: tuple[int, ...], arguments: tuple[Any, ...]) -> tuple[str, ...]:
    device = jax.devices()[0]
    if device.platform != "cpu":
        raise NotKept("programs of accelerators are left to JAX's own compilation cache")
    leaves, structure = jax.tree.flatten(arguments)
    for leaf in leaves:
        if isinstance(leaf, jax.Array) and leaf.devices() != {device}:
            raise NotKept("programs of several devices are left to JAX's own compilation cache")
    types = [_type(leaf) for leaf in leaves]
    inputs = frozenset(map(id, leaves))
    return machine(), spell(function, inputs), repr(donated), str(structure), *types


def _type(leaf: Any) -> str:
    found = jax.typeof(leaf)
    return f"{found.dtype}{list(found.shape)}{' weak' if found.weak_type else ''}"


def _text(lowered: Any) -> str:
    """Return letters that stand for what the compiler is given."""
    return hashlib.sha256(lowered.as_text().encode()).hexdigest()


class _File(NamedTuple):
    """What a file holds: a program, pickled, and what it was compiled from and under what conditions."""

    content: bytes
    text: str
    conditions: Mapping[str, Any]


def _parse(data: bytes) -> _File:
    line, _, content = data.partition(b"\n")
    try:
        head = json.loads(line)
        form, expected, text, conditions = (head[name] for name in ("form", "sha256", "text", "conditions"))
    except (ValueError, KeyError, TypeError):
        raise NotKept("a file is damaged or of another version") from None
    if form != _FORM:
        raise NotKept("a file is of another version")
    # Looked at before it is unpickled, for damage would be run.
    if hashlib.sha256(content).hexdigest() != expected:
        raise NotKept("a file is damaged")
    return _File(content, text, conditions)


def _load(content: bytes, arguments: tuple[Any, ...]) -> Callable[..., Any]:
    try:
        serialized, inputs, outputs, objects = pickle.loads(content)
        if inputs != jax.tree.structure((arguments, {})):
            raise NotKept("a program takes other arguments")
        machine_code.load_objects(objects)
        devices = jax.devices()[:1]
        return serialize_executable.deserialize_and_load(serialized, inputs, outputs, execution_devices=devices)
    except NotKept:
        raise
    except Exception as error:  # a library that reads its own form no longer
        raise NotKept(f"a program cannot be loaded ({type(error).__name__})") from error
