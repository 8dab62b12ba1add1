"""Chooses what reads a checkpoint's kernels and tables in few bits, and reads those that are stored so."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from jaxinfer.checkpoint.few_bits import FewBits, FewBitsReader, join_layers, rows_of
from jaxinfer.checkpoint.few_bits_experts import gather_experts
from jaxinfer.checkpoint.leaves import Leaf
from jaxinfer.checkpoint.source import Checkpoint, QuantizedSource
from jaxinfer.models.families.family import Part
from jaxinfer.models.few_bits import is_kernel, is_table
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.cpu_kernels.few_bits.products import multiplies_few_bits
from jaxinfer.ops.few_bits.formats import Format
from jaxinfer.ops.few_bits.quantized_array import QuantizedArray


@runtime_checkable
class MatrixReader(Protocol):
    """Reads kernels and tables in few bits; ``widened`` says in words what could not stay so.

    ``backend`` is what kernels are laid out for, None for kernels as they are stored, ``named`` what messages begin
    with.
    """

    backend: Backend | None
    widened: set[str]

    def named(self, checkpoint: Checkpoint) -> str:
        """Return what is asked for, or the checkpoint."""
        ...

    def read(self, checkpoint: Checkpoint, leaf: Leaf, read_plainly: Any) -> QuantizedArray | None:
        """Return a kernel or a table in few bits, None for a parameter that stays as it is.

        ``read_plainly(checkpoint, leaf)`` reads any parameter.
        """
        ...


def choose_reader(
    checkpoint: Checkpoint, few_bits: FewBits | None, backend: Backend, *, is_split: bool
) -> MatrixReader | None:
    """Return what reads a checkpoint in the bits that are asked for or that it has, None for plain numbers.

    ``is_split`` is whether it runs on a mesh. Raises InvalidOption for a checkpoint that does not have what is asked.
    """
    if few_bits is not None:
        few_bits.check(checkpoint)
        return FewBitsReader(few_bits, backend=backend)
    if not (isinstance(checkpoint.tensors, QuantizedSource) and checkpoint.tensors.forms()):
        return None

    def why_not(form: Format, width: int) -> str | None:
        if backend.param_dtype == "float64":
            return "products in float64"
        if form.is_ordered and is_split:
            return "inputs in an order of their own on a mesh"
        # XLA spreads sparse kernels where no product of ours does.
        is_multiplied = not backend.cpu_kernels or form.kept is not None or multiplies_few_bits(form, width)
        return None if is_multiplied else "no products on this processor"

    return StoredReader(why_not, backend=backend)


@dataclass
class StoredReader:
    """Keeps what is stored in few bits where ``why_not`` gives no reason against its form and its number of inputs."""

    why_not: Callable[[Format, int], str | None]
    backend: Backend | None = None
    widened: set[str] = field(default_factory=set)

    def named(self, checkpoint: Checkpoint) -> str:
        """Return the checkpoint's name."""
        return checkpoint.origin

    def read(self, checkpoint: Checkpoint, leaf: Leaf, read_plainly: Any) -> QuantizedArray | None:
        """Return a kernel or a table in few bits, None for a parameter that is plain, or becomes so."""
        tensors, forms = checkpoint.tensors, self._forms(checkpoint, leaf)
        if forms is None:
            return None
        assert isinstance(tensors, QuantizedSource)
        reason = self._reason(leaf, forms)
        if reason is not None:
            self.widened.add(reason)
            return None
        is_ordered = any(form is not None and form.is_ordered for form in forms)

        def read_part(part: Part) -> QuantizedArray:
            cut = rows_of(tensors.quantized(part.tensor), part.rows(leaf.num_rows))
            return _ordered(cut) if is_ordered else cut

        if leaf.is_matrix_each and forms[0] is not None:
            return gather_experts(leaf, replace(forms[0], is_ordered=is_ordered), read_part)
        layers = []
        for parts in leaf.sources:
            cut = list(map(read_part, parts))
            layers.append(cut[0] if len(cut) == 1 else jax.tree.map(lambda *rows: np.concatenate(rows), *cut))
        return join_layers(leaf, layers)

    def keeps(self, checkpoint: Checkpoint, leaf: Leaf) -> bool:
        """Tell whether `read` would return a parameter in few bits; reads no weights."""
        forms = self._forms(checkpoint, leaf)
        return forms is not None and self._reason(leaf, forms) is None

    def _forms(self, checkpoint: Checkpoint, leaf: Leaf) -> list[Format | None] | None:
        """Return the forms of a parameter's tensors, None for plain numbers or another form; None if none has any."""
        assert isinstance(checkpoint.tensors, QuantizedSource)
        stored = checkpoint.tensors.forms()
        names = [part.tensor for parts in leaf.sources for part in parts]
        if not any(name in stored for name in names):
            return None
        return [None if (found := stored.get(name)) is None else found.form for name in names]

    def _reason(self, leaf: Leaf, forms: list[Format | None]) -> str | None:
        """Return why a parameter of tensors of these forms is widened."""
        if "router" in leaf.path:
            return "routers, whose choices need wide scores"
        if not (is_kernel(leaf.path) or is_table(leaf.path)):
            return "what is no matrix of products"
        known = [form for form in forms if form is not None]
        if len(known) < len(forms):
            return "groups that are no equal runs of 32 inputs, or parts that are plain numbers"
        is_joined = any(len(parts) > 1 for parts in leaf.sources) and not leaf.is_matrix_each
        if any(form.is_ordered for form in known) and is_joined:
            return "parameters of several tensors whose inputs are in orders of their own"
        if len({replace(form, is_ordered=False) for form in known}) > 1:
            return "layers or parts in several forms"
        reasons = (self.why_not(form, leaf.shape[-1]) for form in known)
        return next((reason for reason in reasons if reason is not None), None)


def _ordered(array: QuantizedArray) -> QuantizedArray:
    """Return an array as one whose inputs are taken in an order."""
    if array.form.is_ordered:
        return array
    order = np.arange(array.shape[-1], dtype=np.int32)[None]
    return replace(array, order=order, form=replace(array.form, is_ordered=True))
