"""What may change a program changes its spelling, and what has none is refused."""

import dataclasses
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.decoding.programs import decode, full_logits, prefill
from jaxinfer.decoding.strategies.autoregressive import Autoregressive
from jaxinfer.decoding.strategies.medusa import Medusa
from jaxinfer.decoding.strategies.prompt_lookup import PromptLookup
from jaxinfer.decoding.strategies.sum_of_drafters import SumOfDrafters
from jaxinfer.kept.folder import NotKept
from jaxinfer.kept.spelling import digest, spell
from jaxinfer.models.decoder import Decoder
from tests.toys import TINY_LLAMA, float32_backend

BACKEND = float32_backend()
DECODER = Decoder(TINY_LLAMA, BACKEND)


def different_programs() -> list[Any]:
    lookup = PromptLookup()
    decoders = [
        DECODER,
        Decoder(dataclasses.replace(TINY_LLAMA, norm_eps=1e-6), BACKEND),
        Decoder(dataclasses.replace(TINY_LLAMA, eos_token_ids=(1,)), BACKEND),
        *(
            Decoder(TINY_LLAMA, dataclasses.replace(BACKEND, **{change: value}))
            for change, value in (("compute_dtype", "bfloat16"), ("cpu_kernels", False), ("min_matmul_rows", 4))
        ),
    ]
    strategies = [
        Autoregressive(),
        lookup,
        dataclasses.replace(lookup, num_draft_tokens=lookup.num_draft_tokens + 1),
        Medusa(paths=((0,),)),
        Medusa(paths=((0,), (1,))),
        Medusa(paths=((0,),), params={"ids": jnp.arange(3)}),
        Medusa(paths=((0,),), params={"ids": jnp.arange(3) + 1}),
        SumOfDrafters((lookup,)),
        SumOfDrafters((lookup, lookup)),
        SumOfDrafters((lookup,), 3),
    ]
    return [
        *(partial(full_logits, decoder) for decoder in decoders),
        *(partial(decode, DECODER, strategy) for strategy in strategies),
        *(partial(prefill, DECODER, Autoregressive(), count) for count in (16, 32)),
    ]


def test_programs_that_differ_are_spelled_differently() -> None:
    programs = different_programs()
    assert len({spell(program) for program in programs}) == len(programs)
    assert [spell(program) for program in programs] == [spell(program) for program in different_programs()]


def test_a_number_is_not_the_text_or_the_number_that_looks_like_it() -> None:
    values = [1, 1.0, True, "1", b"1", None, (1,), [1], ((1,),), {"a": 1}, {"a": 1.0}, np.int32(1), np.float32(1)]
    assert len({spell(value) for value in values}) == len(values)
    assert digest("ab", "c") != digest("a", "bc")


def test_arguments_are_spelled_by_type_and_constants_by_value() -> None:
    one, other = jnp.zeros(3), jnp.ones(3)
    arguments = frozenset({id(one), id(other)})
    assert spell(one, arguments) == spell(other, arguments)
    assert spell(one) != spell(other)
    assert spell(one, arguments) != spell(one.astype(jnp.bfloat16), arguments)
    assert spell(jnp.zeros(3)) != spell(jnp.zeros((3, 1)))


@dataclasses.dataclass(frozen=True)
class Foreign:
    """Code that no digest of the package's own files covers."""

    width: int = 1


@pytest.mark.parametrize(
    "value",
    [
        Foreign(),
        object(),
        {1, 2},
        lambda: None,
        partial(lambda: None),
        partial(different_programs),
        SumOfDrafters((Autoregressive(),)).__class__,
        (1, [Foreign()]),
    ],
)
def test_what_could_hide_something_is_refused(value: Any) -> None:
    with pytest.raises(NotKept):
        spell(value)
