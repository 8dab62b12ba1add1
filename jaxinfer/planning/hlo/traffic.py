"""The HBM bytes that an instruction of a compiled program reads and writes, and the operations of its products.

Arrays in vector memory (layouts marked ``S(1)``) cost nothing. A fusion costs only its operands and results. A slice,
also inside a fusion, costs the slice. An update in place costs the bytes it writes.
"""

import itertools
import math
import re

from jaxinfer.planning.hlo.text import Array, Computation, Line, Program

_FREE = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "domain",
         "after-all", "optimization-barrier", "partition-id", "replica-id", "async-start", "async-update",
         "async-done", "add-dependency")  # fmt: skip
_SLICES = ("dynamic-slice", "slice", "gather")
_UPDATES = ("dynamic-update-slice", "scatter")
_ALIASES = ("bitcast", "get-tuple-element", "optimization-barrier", "copy")
_NO_KERNELS = ("AllocateBuffer", "Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape")
_ESTIMATE = re.compile(r'"cost_estimate":\{([^}]*)\}')
_DIMENSIONS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_WINDOW = re.compile(r"window=\{([^}]*)\}")


def hbm_traffic(program: Program, computation: Computation, line: Line) -> tuple[int, int]:
    """Return the bytes that an instruction outside a fusion reads from and writes to HBM.

    An asynchronous transfer counts at its end. A kernel costs its own estimate (`pl.CostEstimate`), counted as reads,
    or without an estimate its operands and results.
    """
    if line.opcode in _FREE or line.opcode.endswith("-start"):
        return 0, 0
    if line.opcode.endswith("-done") and line.operands:
        start = computation.lines[line.operands[0]]
        line = Line(
            line.name,
            start.opcode.removesuffix("-start"),
            line.results,
            start.operands,
            start.attributes,
            start.arguments,
            line.root,
        )
    if line.opcode == "custom-call":
        if any(f'custom_call_target="{name}"' in line.attributes for name in _NO_KERNELS):
            return 0, 0
        estimated = _estimate(line, "bytes_accessed")
        if estimated is not None:
            return estimated, 0
    sizes = [computation.lines[name].hbm_bytes if name in computation.lines else 0 for name in line.operands]
    called = program.computations.get(line.called or "") if line.opcode == "fusion" else None
    if called is not None:
        read = sum(
            min(size, _read_in_fusion(program, called, called.parameters[index]))
            for index, size in enumerate(sizes)
            if size and index in called.parameters
        )
        return read, _written_by_fusion(program, called, line)
    if line.opcode in _SLICES:
        taken = sum(_full_bytes(array) for array in line.results)
        return min(sizes[0], taken) + sum(sizes[1:]), line.hbm_bytes
    if line.opcode == "ragged-all-to-all":
        # Of its operand and its result, which begins as the second operand, the smaller is full.
        taken = sum(map(_full_bytes, computation.lines[line.operands[0]].results))
        return min(sizes[0], sum(map(_full_bytes, line.results))), min(line.hbm_bytes, taken)
    if line.opcode in _UPDATES:
        update = computation.lines[line.operands[_update_index(line)]]
        return sum(sizes[1:]), min(line.hbm_bytes, sum(_full_bytes(array) for array in update.results))
    return sum(sizes), line.hbm_bytes


def _estimate(line: Line, name: str) -> int | None:
    found = _ESTIMATE.search(line.attributes)
    value = re.search(rf'"{name}":"?(\d+)', found[1]) if found else None
    return int(value[1]) if value else None


def _update_index(line: Line) -> int:
    """Return the index of the operand with the written values. A scatter takes n arrays, the indices and n updates."""
    return 1 if line.opcode == "dynamic-update-slice" else len(line.operands) // 2 + 1


def _full_bytes(array: Array) -> int:
    """Return the bytes that an array would take in HBM, whatever its memory space."""
    return Array(array.dtype, array.shape, re.sub(r"S\(\d+\)", "", array.layout)).hbm_bytes


def _read_in_fusion(program: Program, computation: Computation, name: str, outside: int = 0) -> int:
    """Return the bytes that a fused computation reads of one of its values, at most the whole value.

    ``outside`` is the bytes read of the computation's result, if the value may be returned unchanged.
    """
    whole = sum(_full_bytes(array) for array in computation.lines[name].results)
    total = outside if computation.lines[name].root else 0
    for user in computation.users.get(name, ()):
        first = user.operands[0] == name and name not in user.operands[1:]
        if user.opcode in _SLICES and first:
            total += sum(_full_bytes(array) for array in user.results)
        elif user.opcode in _ALIASES or (user.opcode in _UPDATES and first):
            total += _read_in_fusion(program, computation, user.name, outside)
        elif user.opcode == "fusion":
            inner = program.computations[user.called or ""]
            places = [index for index, operand in enumerate(user.operands) if operand == name]
            after = _read_in_fusion(program, computation, user.name, outside)
            total += sum(_read_in_fusion(program, inner, inner.parameters[index], after) for index in places)
        elif user.opcode != "tuple":
            return whole
    return min(total, whole)


def _written_by_fusion(program: Program, computation: Computation, line: Line) -> int:
    """Return the bytes that a fusion writes to HBM."""
    root = computation.root
    outputs = list(root.operands) if root.opcode == "tuple" else [root.name]
    if len(outputs) != len(line.results):
        return line.hbm_bytes
    return sum(
        min(array.hbm_bytes, _written(program, computation, computation.lines[name]))
        for array, name in zip(line.results, outputs)
    )


def _written(program: Program, computation: Computation, line: Line) -> int:
    """Return the bytes that a fusion writes to store a value, either over its operand or in a new buffer."""
    if line.opcode == "parameter":
        return 0
    if line.opcode in _UPDATES:
        update = computation.lines[line.operands[_update_index(line)]]
        return sum(_full_bytes(array) for array in update.results)
    if line.opcode == "bitcast" and line.operands[0] in computation.lines:
        return _written(program, computation, computation.lines[line.operands[0]])
    inner = program.computations.get(line.called or "") if line.opcode == "fusion" else None
    if inner is not None and inner.root.opcode != "parameter":
        return _written(program, inner, inner.root)
    return sum(_full_bytes(array) for array in line.results)


def multiplied_flops(computation: Computation, line: Line) -> int:
    """Return the operations of a matrix product, multiplications and additions; 0 for other instructions.

    For a kernel, return its own estimate.
    """
    if line.opcode == "dot":
        left = computation.lines[line.operands[0]].results[0]
        found = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", line.attributes)
        contracted = [int(axis) for axis in found[1].split(",") if axis] if found else []
        return 2 * line.results[0].elements * math.prod(left.shape[axis] for axis in contracted)
    if line.opcode == "convolution":
        return _convolution_flops(computation, line)
    if line.opcode == "custom-call":
        return _estimate(line, "flops") or 0
    return 0


def _convolution_flops(computation: Computation, line: Line) -> int:
    """Return a convolution's operations, without those on padding and on the holes of dilations.

    The TPU compiler writes matrix products as convolutions, and batched ones with a dilated spatial dimension.
    """
    labels = _DIMENSIONS.search(line.attributes)
    if labels is None:
        return 0
    input_labels, kernel_labels, output_labels = labels.groups()
    left, kernel = (computation.lines[name].results[0].shape for name in line.operands[:2])
    output = line.results[0].shape
    window = _WINDOW.search(line.attributes)
    settings = dict(part.split("=", 1) for part in window[1].split()) if window else {}
    pairs = 1
    for axis in range(len(kernel_labels) - 2):
        label = str(axis)
        pairs *= _used_positions(
            left[input_labels.index(label)],
            kernel[kernel_labels.index(label)],
            output[output_labels.index(label)],
            {name: text.split("x")[axis] for name, text in settings.items()},
        )
    batch, features = output[output_labels.index("b")], output[output_labels.index("f")]
    return 2 * batch * features * kernel[kernel_labels.index("i")] * pairs


def _used_positions(size: int, kernel: int, output: int, settings: dict[str, str]) -> int:
    """Count the pairs of output position and kernel position that read an element of the input."""
    stride, dilate, spread = (int(settings.get(name, 1)) for name in ("stride", "lhs_dilate", "rhs_dilate"))
    before = int(settings.get("pad", "0_0").split("_")[0])
    count = 0
    for position, offset in itertools.product(range(output), range(kernel)):
        at = position * stride + offset * spread - before
        count += at % dilate == 0 and 0 <= at // dilate < size
    return count
