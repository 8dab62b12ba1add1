"""A model that leaves zero features out writes what it writes with all, in every bit, with every strategy."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxinfer
from jaxinfer import LanguageModel
from jaxinfer.errors import InvalidOption
from jaxinfer.models.active_columns import COLUMNS
from jaxinfer.ops.active_products import MOST_ROWS, pays
from jaxinfer.ops.sparsity import parse_sparsity
from tests.decoding.covered_models import OTHER_SAMPLINGS, VOCAB_SIZE, random_model
from tests.decoding.rows import request, run
from tests.decoding.strategy_cases import CASES
from tests.toys import TINY_LLAMA, float32_backend, random_params

WIDE = "layerskip"  # drafts with the same layers
# Prompts of more rows than features are left out for.
LENGTHS = (MOST_ROWS + 3, MOST_ROWS + 1, MOST_ROWS + 9)
REQUESTS = [
    request(np.random.default_rng(length).integers(1, VOCAB_SIZE, length).tolist(), 20, sampling)
    for length, sampling in zip(LENGTHS, OTHER_SAMPLINGS)
]


def sparse(lm: LanguageModel, sparsity: str) -> LanguageModel:
    return lm.changed(lm.params, backend=replace(lm.backend, sparsity=parse_sparsity(sparsity)))


def quieter(lm: LanguageModel) -> LanguageModel:
    """Return a model most of whose features are zero, so that leaving them out pays for a few rows."""

    def lower(path, leaf):
        names = [key.key for key in path]
        return leaf - 1.0 if names[-3:] == ["mlp", "up", "bias"] else leaf

    return lm.changed(jax.tree_util.tree_map_with_path(lower, lm.params))


@pytest.fixture(scope="module")
def dense():
    """Return OPT, and what it writes of each request alone."""
    lm = quieter(random_model("opt"))
    return lm, [run(lm, [one])[0] for one in REQUESTS]


def written(rows):
    return [(row.tokens, np.asarray(row.logprobs, np.float32).tobytes()) for row in rows]


def check(dense, name):
    lm, expected = dense
    texts = [[*one.prompt, *row.tokens] for one, row in zip(REQUESTS, expected)]
    strategy = CASES[name].strategy("opt", lm, texts)
    found = run(sparse(lm, "exact"), REQUESTS, strategy)
    assert written(found) == written(expected)
    assert not strategy.max_depth or sum(row.counts.accepted for row in found) > 0


@pytest.fixture(scope="module")
def gated():
    """Return a model with a gate that most features never pass, and what it writes of each request alone."""
    config = replace(TINY_LLAMA, vocab_size=VOCAB_SIZE, activation="relu", ffn_dim=96)

    def close(path, leaf):
        return leaf.at[30:].set(0.0) if [key.key for key in path][-3:-1] == ["mlp", "gate"] else leaf

    params = jax.tree_util.tree_map_with_path(close, random_params(config))
    lm = LanguageModel(config, params, float32_backend())
    return lm, [run(lm, [one])[0] for one in REQUESTS]


def test_with_a_gate_texts_are_those_of_all_features(gated):
    check(gated, "prompt_lookup")


@pytest.mark.exhaustive
def test_texts_are_those_of_all_features(dense):
    check(dense, WIDE)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CASES)
def test_texts_of_every_strategy_are_those_of_all_features(dense, name):
    check(dense, name)


def test_columns_are_what_a_step_reads_and_rows_what_a_prompt_reads(gated):
    """With other columns a text's first token is the same, and its later ones are not."""
    lm, expected = gated
    exact = sparse(lm, "exact")
    blocks = exact.adapted_params["blocks"]
    assert exact.adapted_params is exact.adapted_params
    assert COLUMNS not in exact.params["blocks"]["layer_0"]["mlp"]["down"]
    np.testing.assert_array_equal(
        blocks["layer_0"]["mlp"]["down"][COLUMNS].T, exact.params["blocks"]["layer_0"]["mlp"]["down"]["kernel"]
    )
    held = exact._beside_columns.__self__
    held._columns, held._last = {name: -columns for name, columns in held._columns.items()}, None
    (found,) = run(exact, REQUESTS[:1])
    assert found.logprobs[0] == expected[0].logprobs[0]
    assert found.logprobs[1:] != expected[0].logprobs[1:]


@pytest.mark.parametrize(
    "sparsity",
    [
        pytest.param("topk:8", marks=pytest.mark.slow),
        *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("exact", "threshold:0.4")),
    ],
)
def test_with_a_gate_a_step_has_the_bits_of_a_prompt(gated, sparsity):
    """A prompt reads all weights, a step those of active features; other kinds than exact change the text."""
    dense, expected = gated
    lm = sparse(dense, sparsity)
    (row,) = run(lm, REQUESTS[:1])
    text = [*REQUESTS[0].prompt, *row.tokens]
    logits_TV = jax.nn.log_softmax(jnp.asarray(lm.logits([text])[0]))
    ends = range(len(REQUESTS[0].prompt) - 1, len(text) - 1)
    scored = [float(logits_TV[place, text[place + 1]]) for place in ends]
    np.testing.assert_allclose(row.logprobs, scored, atol=1e-5)
    assert (written([row]) == written(expected[:1])) == (sparsity == "exact")


def test_few_active_features_pay_and_many_do_not():
    few, many = jnp.zeros((3, 40)).at[:, :4].set(1.0), jnp.ones((1, 40))
    assert bool(pays(few, "float32"))
    assert not bool(pays(many, "float32"))
    # Each row has few, all together many.
    assert not bool(pays(jnp.kron(jnp.eye(4), jnp.ones((1, 10))), "float32"))


def test_what_has_no_sparsity_is_refused_in_one_line(tiny_llama_folder, gated):
    folder = tiny_llama_folder()
    refused = {
        "llama with silu has no zeros to leave out: use threshold:T or topk:K": {"sparsity": "exact"},
        "does not go with weights 'int8' yet": {"sparsity": "topk:4", "weights": "int8"},
        "has no products for float32 on this processor": {"sparsity": "topk:4", "scan_layers": True},
        "unknown sparsity 'some'": {"sparsity": "some"},
        "a layer has 64 features: choose fewer": {"sparsity": "topk:65"},
        "topk is a whole number": {"sparsity": "topk:99999999999"},
    }
    for message, options in refused.items():
        with pytest.raises(InvalidOption, match=message):
            jaxinfer.load(folder, **options)
    lm, _ = gated
    layer = lm.params["blocks"]["layer_1"]
    down = {"kernel": layer["mlp"]["down"]["kernel"].at[3, 4].set(jnp.inf)}
    blocks = {**lm.params["blocks"], "layer_1": {**layer, "mlp": {**layer["mlp"], "down": down}}}
    backend = replace(lm.backend, sparsity=parse_sparsity("exact"))
    with pytest.raises(InvalidOption, match=r"layer_1\.down has weights that are not finite"):
        lm.changed({**lm.params, "blocks": blocks}, backend=backend)


def test_a_folder_in_few_bits_is_refused_before_its_weights_are_read(tiny_llama_folder, tmp_path):
    jaxinfer.load(tiny_llama_folder(), weights="int8").save(tmp_path / "int8")
    read = []
    with pytest.raises(InvalidOption, match=r"'topk:4' does not go with weights in few bits yet, which .*mlp\.\w+ has"):
        jaxinfer.load(tmp_path / "int8", sparsity="topk:4", progress=lambda done, total: read.append(done))
    assert read == []


@pytest.mark.slow
def test_a_folder_with_relu_loads_with_sparsity(tiny_llama_folder):
    folder = tiny_llama_folder(activation="relu")
    plain, exact = jaxinfer.load(folder), jaxinfer.load(folder, sparsity="exact")
    texts = [lm.generate([[1, 5, 9]], max_new_tokens=6)[0].tokens for lm in (plain, exact)]
    assert texts[0] == texts[1]
    assert exact.fingerprint == plain.fingerprint
