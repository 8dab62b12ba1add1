"""Finds the values that a program passes to its kernels, if they follow from known arguments."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

_KERNEL = re.compile(r"%([\w.\-]+) = [^\n]*? custom-call\(([^)]*)\), custom_call_target=\"tpu_custom_call\"")
_NUMBERING = re.compile(r"/\*.*?\*/")
_DEFINED = re.compile(r"(%[\w.\-]+) = (\w+\[[\d,]*\])(?:\{([^}]*)\})?")
_LARGEST = 1 << 20


def kernel_operands(
    program: Any, arguments: Sequence[np.ndarray | None], hlo: str
) -> Mapping[str, list[np.ndarray | None]]:
    """Return the memory words of each kernel's operands, None if unknown, by the kernel's name in the HLO text.

    ``program`` is the closed jaxpr that was compiled. Only small operations outside loops on known ``arguments`` and
    constants are evaluated.
    """
    calls: list[list[Any]] = []
    _evaluate(program.jaxpr, program.consts, list(arguments), calls)
    result: dict[str, list[np.ndarray | None]] = {}
    for name, inputs in _kernels(hlo):
        # Names differ between jaxpr and HLO, so kernels are matched by operand types, then by order.
        same = next(
            (call for call in calls if [_described(atom) for atom, _ in call] == [text for text, _ in inputs]), None
        )
        if same is not None:
            calls.remove(same)
            result[name] = [
                None if value is None else _in_memory(np.asarray(value), layout)
                for (_, value), (_, layout) in zip(same, inputs)
            ]
    return result


def _kernels(hlo: str) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return the name of each kernel of a program, with the types and layouts of its operands."""
    types = {name: (array, layout) for name, array, layout in _DEFINED.findall(hlo)}
    found = [(match[1], _NUMBERING.sub("", match[2]).split(", ")) for match in _KERNEL.finditer(hlo)]
    found.sort(key=lambda kernel: (len(kernel[0]), kernel[0]))
    return [(name, [types.get(operand.strip(), ("", "")) for operand in operands]) for name, operands in found]


def _described(atom: Any) -> str:
    """Format the type of a value as in HLO text."""
    dtype = np.dtype(atom.aval.dtype)
    kind = {"f": "f", "i": "s", "u": "u", "b": "pred", "V": "f"}[dtype.kind]
    bits = "" if kind == "pred" else str(jax.dtypes.itemsize_bits(dtype))
    named = {"bfloat16": "bf16", "int4": "s4", "uint4": "u4"}
    name = named.get(dtype.name, kind + bits)
    return f"{name}[{','.join(map(str, atom.aval.shape))}]"


def _evaluate(jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Any], calls: list[list[Any]]) -> list[Any]:
    """Evaluate a jaxpr as far as values are known; others are None. Append each kernel's operands to ``calls``."""
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, consts)) | dict(zip(jaxpr.invars, inputs))
    for equation in jaxpr.eqns:
        operands = [atom.val if isinstance(atom, core.Literal) else values.get(atom) for atom in equation.invars]
        outputs: Sequence[Any] = [None] * len(equation.outvars)
        inner = [value for value in equation.params.values() if isinstance(value, core.ClosedJaxpr | core.Jaxpr)]
        if equation.primitive.name == "pallas_call":
            calls.append(list(zip(equation.invars, operands)))
        elif len(inner) == 1 and equation.primitive.name not in ("scan", "while") and _matches(inner[0], operands):
            closed = inner[0]
            body, constants = (closed.jaxpr, closed.consts) if isinstance(closed, core.ClosedJaxpr) else (closed, [])
            outputs = _evaluate(body, constants, operands, calls)
        elif not inner and all(value is not None for value in operands) and _small(equation):
            with jax.default_device(jax.devices("cpu")[0]):
                outcome = equation.primitive.bind(*operands, **equation.params)
            outputs = outcome if equation.primitive.multiple_results else [outcome]
        values.update(zip(equation.outvars, outputs))
    return [atom.val if isinstance(atom, core.Literal) else values.get(atom) for atom in jaxpr.outvars]


def _matches(inner: Any, operands: Sequence[Any]) -> bool:
    jaxpr = inner.jaxpr if isinstance(inner, core.ClosedJaxpr) else inner
    return len(jaxpr.invars) == len(operands)


def _small(equation: Any) -> bool:
    return all(getattr(atom.aval, "size", _LARGEST) < _LARGEST for atom in equation.outvars)


def _in_memory(value: np.ndarray, layout: str) -> np.ndarray | None:
    """Return the 32-bit words of an array in the order of its layout, such as ``1,0:T(8,128)``: padded tiles."""
    if value.dtype.itemsize != 4:
        return None
    order, _, rest = layout.partition(":")
    if order:
        value = value.transpose([int(axis) for axis in order.split(",")][::-1])
    tile = re.match(r"T\(([\d,]+)\)", rest)
    if tile is None or value.ndim == 0:
        return value.reshape(-1)
    sizes = [int(size) for size in tile[1].split(",")][-value.ndim :]
    lead = value.ndim - len(sizes)
    padding = [(0, 0)] * lead + [(0, -length % size) for length, size in zip(value.shape[lead:], sizes)]
    value = np.pad(value, padding)
    split = list(value.shape[:lead])
    for length, size in zip(value.shape[lead:], sizes):
        split += [length // size, size]
    outer = [lead + 2 * axis for axis in range(len(sizes))]
    value = value.reshape(split).transpose([*range(lead), *outer, *(axis + 1 for axis in outer)])
    return value.reshape(-1)
