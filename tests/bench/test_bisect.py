"""The first operation whose bits depend on how a text is run is found, by its layer and name."""

import jax
import jax.numpy as jnp
import pytest

from jaxinfer.bench.identity import bisect
from jaxinfer.bench.identity.bisect import (
    Difference,
    Variant,
    bisect_texts,
    check_bisects,
    first_difference,
    usual_variants,
)
from jaxinfer.errors import InvalidOption
from jaxinfer.language_model import LanguageModel
from jaxinfer.models import block, mlp, network, norm
from jaxinfer.models.decoder import Decoder, create_cache, forward
from tests.toys import TINY_LLAMA, float32_backend, random_params

TEXT = (1, 70, 80, 90, 33, 44)
CACHE = "streaming:sinks=4,window=16"


def toy():
    return LanguageModel(TINY_LLAMA, random_params(TINY_LLAMA), float32_backend())


def disturbed(is_hit):
    """Return an activation that adds a little to the first number where its input's shape says so."""

    def activate(inputs):
        outputs = jax.nn.silu(inputs)
        return outputs.at[..., 0].add(1e-3) if is_hit(inputs.shape) else outputs

    return activate


def test_what_does_not_differ_is_not_found():
    assert first_difference(toy(), TEXT, [Variant(), Variant(), Variant(batch=3, row=2)]) is None


@pytest.mark.parametrize(
    ("variant", "token"), [(Variant(batch=2, row=1), 0), (Variant(cuts=(3, 5)), 3), (Variant(siblings=2), 0)]
)
def test_a_deliberate_dependence_is_found_where_it_is(monkeypatch, variant, token):
    """The shapes that are hit: a batch of two, a pass of two tokens, and a pass of all tokens with two siblings."""
    hit = ((2, 6), (1, 2), (1, 8))
    silu = disturbed(lambda shape: shape[:2] in hit)
    monkeypatch.setattr(mlp, "ACTIVATIONS", {**mlp.ACTIVATIONS, "silu": silu})
    found = first_difference(toy(), TEXT, [Variant(), variant])
    assert found.variant == variant
    assert (found.operation, found.layer, found.token) == ("blocks.layer_0.mlp.activated", 0, token)
    assert found.count == (2 if variant.cuts else len(TEXT))
    assert found.total == len(TEXT) * TINY_LLAMA.ffn_dim
    assert 1e-4 < found.largest < 1e-2


@pytest.mark.slow
def test_texts_are_run_in_every_usual_way(monkeypatch):
    """Texts are made equally long by repetition, and a difference comes with its text's index."""
    texts, ways = [TEXT[:2], TEXT, (1, 7)], usual_variants(len(TEXT))
    assert [str(way) for way in ways] == [
        "alone",
        "as row 2 of 3",
        "cut after 3 tokens",
        "beside 3 nodes of a tree",
        "with 64 spare slots",
    ]
    assert bisect_texts(toy(), texts) is None
    hit = Difference(ways[-1], "logits", 4, 1, 2, 0.5)
    run: list[list[int]] = []

    def found(lm, tokens, variants):
        assert variants == ways
        run.append(tokens)
        return hit if len(run) == 3 else None

    monkeypatch.setattr(bisect, "first_difference", found)
    assert bisect_texts(toy(), texts) == (2, hit)
    assert run == [[1, 70, 1, 70, 1, 70], list(TEXT), [1, 7, 1, 7, 1, 7]]
    monkeypatch.setattr(bisect, "LONGEST_TEXT", 4)
    monkeypatch.setattr(bisect, "usual_variants", lambda length: ways)
    assert bisect_texts(toy(), texts) is None
    assert run[-2] == list(TEXT[:4])


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"mesh": "data=1"}, "on a mesh"), ({"scanned": True}, "in a scan"), ({"cache": CACHE}, "streaming cache")],
)
def test_models_that_cannot_be_looked_into_are_refused(options, reason):
    scanned = options.pop("scanned", False)
    backend, params = float32_backend(scanned), random_params(TINY_LLAMA, scan_layers=scanned)
    with pytest.raises(InvalidOption, match=reason):
        check_bisects(LanguageModel(TINY_LLAMA, params, backend, **options))


def test_a_difference_outside_the_layers_has_none(monkeypatch):
    original = network.embed
    monkeypatch.setattr(network, "embed", lambda table, ids, backend: original(table, ids, backend) * len(ids))
    found = first_difference(toy(), TEXT, [Variant(), Variant(batch=2)])
    assert (found.operation, found.layer) == ("embedded_tokens", None)


def test_a_pass_that_asks_for_no_taps_is_the_same_program_as_without(monkeypatch):
    decoder, params = Decoder(TINY_LLAMA, float32_backend()), random_params(TINY_LLAMA)

    def traced():
        cache, start_B = create_cache(TINY_LLAMA, 1, 8, decoder.backend), jnp.zeros((1,), jnp.int32)
        positions = jnp.arange(4)[None]

        def run(params, tokens):
            placements = cache.place(start_B, jnp.tri(4, dtype=bool)[None])
            return forward(decoder, params, tokens, positions, cache, placements, start_B)[0]

        return str(jax.make_jaxpr(run)(params, positions))

    with_taps = traced()
    for module in (block, network, norm):
        monkeypatch.setattr(module, "tap", lambda module, name, value: value)
    assert traced() == with_taps
