"""compressed-tensors' files: integers of 4 or 8 bits in 32-bit words, bytes, or floats of 8 bits.

``config_groups`` give a scheme to modules, by their names, by regular expressions (``re:...``) or by a class of layers;
what ``ignore`` names is stored as plain numbers. Packed codes lie along the inputs, packed zeros along the outputs;
both have half of their range added, so that they are not negative.
"""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from jaxinfer.checkpoint.published.coded_matrix import CodedMatrix, even_groups
from jaxinfer.checkpoint.published.fp8 import ACTIVATIONS, INPUT_SCALES, float_layer
from jaxinfer.checkpoint.published.quantization_keys import QuantizationKeys
from jaxinfer.checkpoint.published.scheme import Scheme
from jaxinfer.checkpoint.published.stored import Layer, Stored, unpack
from jaxinfer.errors import InvalidCheckpoint
from jaxinfer.ops.few_bits.formats import SIGNED, UNSIGNED

_PACKED, _MIXED = "pack-quantized", "mixed-precision"
# The types of weights that each format has.
_TYPES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        _PACKED: ("int",),
        "int-quantized": ("int",),
        "float-quantized": ("float",),
        "naive-quantized": ("int", "float"),
    }
)
_ORDERS = (False, True, "group", "weight", "dynamic", "static")
_OF_INPUTS = """
    num_bits type symmetric group_size strategy block_structure dynamic actorder observer observer_kwargs scale_dtype
    zp_dtype
"""
_REGEX = "re:"
_TABLES = ("embed_tokens", "wte", "wpe", "embed_in")
_PACKED_WEIGHT, _SCALE = ".weight_packed", ".weight_scale"


class _Weights(NamedTuple):
    """How the modules of ``targets`` are stored: blocks of so many outputs and inputs share a scale, 0 for all."""

    is_packed: bool
    is_float: bool
    bits: int
    is_symmetric: bool
    block: tuple[int, int]
    targets: tuple[str, ...]


def read_compressed_tensors(keys: QuantizationKeys) -> Scheme:
    """Return how a checkpoint of ``quant_method`` compressed-tensors is read."""
    form = keys.one_of("format", (*_TYPES, _MIXED))
    keys.one_of("quantization_status", ("compressed", "frozen"), "compressed")
    keys.empty("kv_cache_scheme", "moe_sparsity_config", "transform_config")
    sparsity = keys.section("sparsity_config")
    if sparsity is not None:
        sparsity.one_of("format", ("dense",))
        sparsity.without_effect("global_sparsity ignore registry_requires_subclass sparsity_structure targets")
        sparsity.finish(None)
    keys.without_effect("global_compression_ratio version run_compressed dequantize use_optimized_inference")
    ignored = keys.words("ignore")
    groups = keys.section("config_groups")
    if groups is None:
        raise keys.refuse("config_groups", None, "it must have a group")
    found = [_read_group(groups, name, form) for name in groups.names()]
    groups.finish(None)
    kinds = [weights for weights, _ in found]

    def layers(stored: Stored) -> dict[str, Layer]:
        modules = [*stored.ending_in(_PACKED_WEIGHT), *stored.ending_in(_SCALE)]
        return {
            f"{module}.weight": _layer(stored, module, _weights_of(stored, module, kinds, ignored))
            for module in dict.fromkeys(modules)
        }

    bits = " and ".join(dict.fromkeys(f"{each.bits} bits" for each in kinds))
    notice = ACTIVATIONS if any(has_inputs for _, has_inputs in found) else None
    return keys.finish(Scheme(f"compressed-tensors, {bits}", layers, INPUT_SCALES, notice))


def _read_group(groups: QuantizationKeys, name: str, form: str) -> tuple[_Weights, bool]:
    """Return how a group's weights are stored, and whether it has a scheme for their inputs."""
    group = groups.section(name)
    weights = None if group is None else group.section("weights")
    if group is None or weights is None:
        raise groups.refuse(name, None, "it must say how weights are stored")
    form = group.one_of("format", tuple(_TYPES), None if form == _MIXED else form)
    targets = group.words("targets")
    group.empty("output_activations")
    inputs = group.section("input_activations")
    if inputs is not None:
        inputs.without_effect(_OF_INPUTS)
        inputs.finish(None)
    group.finish(None)

    is_float = weights.one_of("type", _TYPES[form], "int") == "float"
    bits = weights.one_of("num_bits", (4, 8) if form == _PACKED else (8,), 8)
    is_symmetric = weights.one_of("symmetric", (True,) if is_float else (True, False), True)
    size = weights.group_size("group_size") if weights.has("group_size") else None
    strategies = ("tensor", "channel", "group", *(["block"] if is_float else []))
    default = "group" if size else "channel" if weights.has("group_size") else "tensor"
    strategy = weights.one_of("strategy", strategies, default)
    block = weights.sizes("block_structure") if strategy == "block" else None
    if strategy == "group" and size is None:
        raise weights.refuse("group_size", size, "it must be a number of inputs")
    weights.one_of("actorder", _ORDERS, False)
    weights.empty("dynamic", *(["block_structure"] if block is None else []))
    weights.without_effect("group_size observer observer_kwargs scale_dtype zp_dtype")
    weights.finish(None)
    if block is None:
        block = {"tensor": (0, 0), "channel": (1, 0), "group": (1, size or 0)}[strategy]
    found = _Weights(form == _PACKED, is_float, bits, is_symmetric, block, targets)
    return found, inputs is not None


def _weights_of(stored: Stored, module: str, kinds: list[_Weights], ignored: tuple[str, ...]) -> _Weights:
    if any(_matches(module, target) for target in ignored):
        raise InvalidCheckpoint(f"{stored.origin}: {module} is quantized, but the configuration's ignore names it")
    # Whatever the order of the groups; of two with the same target the last counts.
    found = {target: weights for weights in kinds for target in weights.targets if _matches(module, target)}
    if not found:
        raise InvalidCheckpoint(f"{stored.origin}: {module} is quantized, but it is no target of config_groups")
    return found[min(sorted(found), key=lambda target: _rank(module, target))]


def _rank(module: str, target: str) -> int:
    """Return 0 for a module's name, which counts first, 1 for a regular expression, 2 for its class."""
    return 0 if target == module else 1 if target.startswith(_REGEX) else 2


def _matches(module: str, target: str) -> bool:
    """Whether a target is a module's name, a regular expression for its beginning, or its class."""
    if target.startswith(_REGEX):
        try:
            return re.match(target.removeprefix(_REGEX), module) is not None
        except (re.error, RecursionError):
            raise InvalidCheckpoint(f"config.json: quantization_config: {target!r} is no regular expression") from None
    is_table = module.endswith(_TABLES)
    return target == module or (target == "Linear" and not is_table) or (target == "Embedding" and is_table)


def _layer(stored: Stored, module: str, weights: _Weights) -> Layer:
    scales = f"{module}{_SCALE}"
    if weights.is_float:
        return float_layer(stored, module, weights.block, scales)
    name, zeros, places = (f"{module}.{kind}" for kind in ("weight", "weight_zero_point", "weight_g_idx"))
    name, of_shape = (f"{module}{_PACKED_WEIGHT}", f"{module}.weight_shape") if weights.is_packed else (name, "")
    outputs, width = _shape(stored, name, of_shape) if of_shape else stored.matrix_shape(name)
    size = weights.block[1] or width
    if width % size:
        raise stored.wrong(name, f"has {width} inputs, which groups of {size} do not divide")
    num_groups = width // size
    has_places = places in stored.shapes

    bits, middle = weights.bits, 1 << weights.bits - 1
    stored_shape = (outputs, -(-width * bits // 32)) if weights.is_packed else (outputs, width)
    kind = "int32" if weights.is_packed else "int8"

    def codes() -> np.ndarray:
        found = stored.read(name, stored_shape, kind)
        if not weights.is_packed:
            return found
        found = unpack(found, bits)[:, :width]
        return found ^ middle if bits == 8 else found

    def read() -> CodedMatrix:
        found = stored.block_scales(scales, (outputs, width), weights.block)
        groups = even_groups(width, size)
        if has_places:
            given = stored.read(places, (width,), "int32", "int64")
            if given.max() >= num_groups or given.min() < -1:
                raise stored.wrong(places, f"has a group that is none of 0 to {num_groups - 1}; download it again")
            # A checkpoint whose inputs were never ordered has -1.
            groups = groups if given.min() < 0 else given
        stored.check(name, stored_shape, kind)
        if weights.is_symmetric and zeros in stored.shapes:
            _check_no_zeros(stored, zeros, bits)
        if not weights.is_packed:
            own = None
            if not weights.is_symmetric:
                own = stored.block_scales(zeros, (outputs, width), weights.block, "int8")
            return CodedMatrix(8, codes, found, groups, (), own)
        own = None
        if not weights.is_symmetric:
            words = stored.read(zeros, (-(-outputs * bits // 32), num_groups), "int32")
            own = np.ascontiguousarray(unpack(words.T, bits)[:, :outputs].T)
        if bits == 8:
            own = None if own is None else (own ^ middle).view(np.int8)
            return CodedMatrix(8, codes, found, groups, (), own)
        own = None if own is None else own.view(np.int8)
        return CodedMatrix(4, codes, found, groups, SIGNED if own is None else UNSIGNED, own)

    parts = (name, scales, zeros, places, of_shape)
    return Layer(tuple(part for part in parts if part in stored.shapes), (outputs, width), read)


def _check_no_zeros(stored: Stored, zeros: str, bits: int) -> None:
    """Raise InvalidCheckpoint for zero points, packed or not, of weights that are said to have none."""
    found = stored.read(zeros, None, "int8", "int32", "int64")
    middle = 1 << bits - 1
    if found.any() and not (found.dtype == np.int32 and np.isin(unpack(found, bits), (middle, 0)).all()):
        raise stored.wrong(zeros, "has zero points, but the configuration says that the weights are symmetric")


def _shape(stored: Stored, packed: str, of_shape: str) -> tuple[int, int]:
    """Return the shape of a packed matrix, which a tensor of its own says."""
    found = stored.read(of_shape, (2,), "int64", "int32")
    outputs, width = (int(each) for each in found)
    if outputs < 1 or width < 1 or outputs * width > 16 * max(1, stored.num_bytes(packed)):
        raise stored.wrong(of_shape, f"says {[outputs, width]}, which {packed.rpartition('.')[2]} does not hold")
    return outputs, width
