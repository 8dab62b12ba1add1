"""Each row of a batch writes what the model with its own adapter writes, by every strategy, and sees no other row."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxinfer
from jaxinfer import LanguageModel, SamplingParams
from jaxinfer.checkpoint.adapters.other_tensors import PREFIX
from jaxinfer.errors import InvalidOption, UnsupportedModel
from jaxinfer.models.decoder import abstract_params
from jaxinfer.models.families.registry import family_of
from jaxinfer.models.model import Model
from jaxinfer.models.stacking import stack_params
from jaxinfer.ops.backend import choose_backend
from tests.decoding.covered_models import SAMPLINGS, random_model, random_prompts
from tests.decoding.strategy_cases import CASES
from tests.toy_adapters import edit_adapter, with_magnitudes, with_tables, write_adapter
from tests.toys import random_params

ADAPTERS = (None, "all", "few", "all", "dora")
SAMPLED = [replace(sampling, logprobs=True) for sampling in SAMPLINGS]
# All of one size, so that rows alone share their programs.
PROMPTS = [(prompt * 7)[: 20 - row] for row, prompt in enumerate(random_prompts())]
ROWS = tuple(range(len(PROMPTS)))
# It drafts with the target's own layers.
WIDE = ("layerskip",)


def with_adapters(lm: LanguageModel, folder: Path) -> LanguageModel:
    """Load adapters of other ranks, of other layers, with magnitudes, and of tables, norms and biases."""
    joined = lm.config.family == "gpt2"  # its queries, keys and values are one tensor
    every = ("attention.output", "mlp.up", "mlp.down") if joined else None
    written = write_adapter(folder / "dora", lm.config, 3, 3, ("attention.output", "mlp.up"))
    lm.load_adapter("dora", edit_adapter(written, with_magnitudes))
    lm.load_adapter("all", write_adapter(folder / "all", lm.config, 1, 4, every))
    few = write_adapter(folder / "few", lm.config, 2, 9, ("attention.output", "mlp.down"))
    lm.load_adapter("few", with_tables(few, lm.config))
    return lm


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Callable[[str], LanguageModel]:
    made: dict[str, LanguageModel] = {}

    def make(name: str) -> LanguageModel:
        if name not in made:
            made[name] = with_adapters(random_model(name), tmp_path_factory.mktemp(name))
        return made[name]

    return make


def written(lm: LanguageModel, rows=ROWS, strategy="autoregressive", adapters=ADAPTERS):
    """Return the tokens and log-probabilities of some of the rows."""
    prompts, samplings, names = ([values[row] for row in rows] for values in (PROMPTS, SAMPLED, adapters))
    found = lm.generate(prompts, max_new_tokens=24, sampling=samplings, strategy=strategy, adapter=names)
    return [(result.tokens, result.logprobs) for result in found]


@pytest.mark.slow
def test_a_row_has_the_bits_that_it_has_alone_and_without_an_adapter_those_of_the_model(model):
    lm = model("opt")
    together = written(lm)
    for row in (0, 1, 2, 4):
        assert written(lm, [row]) == [together[row]]
    plain = written(random_model("opt"), adapters=[None] * 5)
    assert written(lm, adapters=[None] * 5) == plain
    assert [found == without for found, without in zip(together, plain)] == [name is None for name in ADAPTERS]


def test_an_adapter_of_tables_norms_and_biases_is_the_merged_model(tmp_path):
    """One whose tables change alike, so that a model of one table can have it."""
    lm = random_model("opt")
    embedding = PREFIX + "model.decoder.embed_tokens"

    def edit(settings, stored):
        settings |= {"modules_to_save": ["final_layer_norm"], "bias": "all", "trainable_token_indices": [5, 3]}
        for module in ("final_layer_norm", "layers.0.final_layer_norm", "layers.1.final_layer_norm"):
            for part, seed in (("weight", 3), ("bias", 4)):
                values = np.random.default_rng(seed).standard_normal(32).astype(np.float32)
                stored[f"{PREFIX}model.decoder.{module}.{part}"] = values
        stored[f"{PREFIX}model.decoder.layers.1.fc1.bias"] = np.random.default_rng(5).standard_normal(48, np.float32)
        rows = np.random.default_rng(6).standard_normal((2, 32), np.float32)
        stored[f"{embedding}.token_adapter.trainable_tokens_delta"] = rows

    lm.load_adapter("tables", edit_adapter(write_adapter(tmp_path / "tables", lm.config, 8, 4, ("mlp.up",)), edit))
    prompts = [prompt[:16] for prompt in PROMPTS]
    live, plain = (np.asarray(lm.logits(prompts, adapter=name)) for name in ("tables", None))
    merged, _ = lm.loaded_adapters.merged("tables")
    tokens_BT, lengths_B = (np.zeros((len(prompts), 16), np.int32), np.array([len(each) for each in prompts], np.int32))
    for row, prompt in enumerate(prompts):
        tokens_BT[row, : len(prompt)] = prompt
    found = np.asarray(lm.programs.logits(merged, tokens_BT, lengths_B, np.zeros(len(prompts), np.int32)))
    for row, prompt in enumerate(prompts):
        there = slice(0, len(prompt))
        np.testing.assert_allclose(live[row, there], found[row, there], atol=1e-4)
        assert np.abs(live[row, there] - plain[row, there]).max() > 0.1
    other = LanguageModel(lm.config, lm.params, lm.backend)
    other.load_adapter("same", lm.adapters["tables"])
    assert other.loaded_adapters.fingerprint("same") == lm.loaded_adapters.fingerprint("tables")

    def change(_, stored):
        stored[f"{PREFIX}model.decoder.layers.1.fc1.bias"].fill(0)
        # PEFT saves the model's own table, too, below low ranks; it is not held once more.
        stored[f"{embedding}.base_layer.weight"] = np.asarray(lm.params["embed"]["embedding"], np.float32)

    edit_adapter(tmp_path / "tables", change)
    other.load_adapter("other", lm.adapters["tables"])
    assert not any("copy" in name for stacks in other.adapted_params["adapters"].values() for name in stacks)
    assert other.loaded_adapters.fingerprint("other") != lm.loaded_adapters.fingerprint("tables")


def test_a_norm_of_the_embedding_is_a_rows_own(tmp_path):
    described = {"model_type": "bloom", "vocab_size": 16, "hidden_size": 32, "n_layer": 1, "n_head": 4}
    config = family_of(described).translate(described)
    lm = LanguageModel(config, random_params(config), choose_backend("float32", "cpu"))

    def edit(settings, stored):
        settings |= {"modules_to_save": ["word_embeddings_layernorm"]}
        for part, seed in (("weight", 3), ("bias", 4)):
            values = np.random.default_rng(seed).standard_normal(32).astype(np.float32)
            stored[f"{PREFIX}transformer.word_embeddings_layernorm.{part}"] = values

    folder = write_adapter(tmp_path, config, only=("attention.output",))
    lm.load_adapter("norm", edit_adapter(folder, edit))
    tokens_BT, positions_BT = jnp.array([[3, 9], [3, 9]], jnp.int32), jnp.array([[0, 1]] * 2, jnp.int32)

    @jax.jit
    def embedded(params, ids_B):
        return Model.adapted(lm.programs.decoder, params, ids_B).embedded(tokens_BT, positions_BT)

    found_BTD = np.asarray(embedded(lm.adapted_params, jnp.array([1, 0], jnp.int32)))
    for row, params in enumerate((lm.loaded_adapters.merged("norm")[0], lm.params)):
        expected_BTD = np.asarray(embedded(params, jnp.zeros(2, jnp.int32)))
        np.testing.assert_allclose(found_BTD[row], expected_BTD[row], atol=1e-5)
    assert np.abs(found_BTD[0] - found_BTD[1]).max() > 0.1


def test_rows_of_a_tied_output_matrix_are_its_own_where_it_has_some(tmp_path):
    lm, rows = random_model("opt"), np.random.default_rng(6).standard_normal((3, 32)).astype(np.float32)
    embedding = f"{PREFIX}model.decoder.embed_tokens.token_adapter.trainable_tokens_delta"

    def edit(settings, stored):
        settings["trainable_token_indices"] = {"embed_tokens": [5, 3], "lm_head": [7]}
        stored[embedding] = rows[:2]
        stored[f"{PREFIX}lm_head.token_adapter.trainable_tokens_delta"] = rows[2:]

    lm.load_adapter("rows", edit_adapter(write_adapter(tmp_path, lm.config, only=("mlp.up",)), edit))
    for table, tokens in (("embed", [5, 3]), ("head", [7])):
        np.testing.assert_array_equal(
            lm.adapted_params["adapters"][table]["tokens"][0][: len(tokens) + 1], [*tokens, -1]
        )


@pytest.mark.exhaustive
def test_logits_are_those_of_the_merged_model_and_of_all_ways_to_run(model):
    lm = model("opt")
    live = np.asarray(lm.logits(PROMPTS, adapter=list(ADAPTERS)))
    for name, row in (("all", 1), ("dora", 4)):
        merged = np.asarray(lm.merge_adapter(name).logits(PROMPTS))[row, : len(PROMPTS[row])]
        np.testing.assert_allclose(live[row, : len(PROMPTS[row])], merged, atol=1e-4)
        assert np.abs(np.asarray(lm.logits(PROMPTS))[row, : len(PROMPTS[row])] - merged).max() > 0.1
    # Layers scanned: by XLA, all rows are multiplied by all adapters, and what is not their own is masked; a TPU's
    # kernel reads those that rows have.
    for kernels in ("xla", "interpret"):
        backend = choose_backend("float32", "cpu", scan_layers=True, kernels=kernels)
        stacked = stack_params(lm.params, abstract_params(lm.config, backend))
        scanned = LanguageModel(lm.config, stacked, backend)
        for name, origin in lm.adapters.items():
            scanned.load_adapter(name, origin)
        found = np.asarray(scanned.logits(PROMPTS, adapter=list(ADAPTERS)))
        for row, prompt in enumerate(PROMPTS):
            np.testing.assert_allclose(found[row, : len(prompt)], live[row, : len(prompt)], atol=2e-4)


def check(lm: LanguageModel, name: str, model_name: str) -> None:
    plain = written(lm)
    texts = [[*prompt, *tokens] for prompt, (tokens, _) in zip(PROMPTS, plain)]
    assert written(lm, strategy=CASES[name].strategy(model_name, lm, texts)) == plain


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in WIDE else pytest.mark.exhaustive) for name in CASES],
)
def test_every_strategy_writes_what_plain_decoding_writes_with_each_rows_adapter(model, name):
    check(model("opt"), name, "opt")


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["gemma2", "gpt2"])
@pytest.mark.parametrize("name", list(CASES))
def test_in_other_families_too(model, name, family):
    check(model(family), name, family)


@pytest.mark.exhaustive
def test_a_search_is_that_of_the_merged_model(model):
    lm = model("opt")
    asked = {"max_new_tokens": 12, "strategy": "beam:width=3"}
    found = lm.generate(PROMPTS[:2], **asked, adapter=["all", None])
    merged, plain = lm.merge_adapter("all").generate(PROMPTS[:1], **asked), lm.generate(PROMPTS[1:2], **asked)
    assert [result.tokens for result in found] == [merged[0].tokens, plain[0].tokens]


@pytest.mark.exhaustive
def test_weights_in_few_bits_stay_as_they_are_below_adapters(tiny_llama_folder, tmp_path):
    folder = tiny_llama_folder(model_dim=64, ffn_dim=128, head_dim=16)
    lm, plain = (jaxinfer.load(folder, dtype="float32", weights=weights) for weights in ("int8", None))
    prompts = [[5, 9, 200, 31], [77, 3, 4]]
    for each in (lm, plain):
        each.load_adapter("a", write_adapter(tmp_path / "a", lm.config))
    base, found, wide = (np.asarray(one.logits(prompts, adapter=name)) for one, name in
                         ((lm, None), (lm, "a"), (plain, "a")))  # fmt: skip
    assert np.abs(found[0] - wide[0]).max() < 0.25 * np.abs(found[0] - base[0]).max()
    with pytest.raises(InvalidOption, match="in few bits, and merging would round them again"):
        lm.merge_adapter("a")


@pytest.mark.slow
def test_loading_and_unloading_compile_nothing_within_a_size_and_texts_go_on(model, tmp_path):
    lm = model("opt")
    before = written(lm)
    pieces = lm.stream(PROMPTS[1], max_new_tokens=24, sampling=SAMPLED[1], adapter="all")
    first = next(pieces)
    compiled = lm.programs.compilations
    # The fourth of four, of a rank that is there already; then another in its place.
    for seed in (5, 6):
        lm.load_adapter("new", write_adapter(tmp_path / str(seed), lm.config, seed, 16))
        found = written(lm, adapters=[None, "new", "few", "all", "dora"])
        assert [row == other for row, other in zip(found, before)] == [True, False, True, True, True]
        lm.unload_adapter("new")
    assert lm.programs.compilations == compiled
    assert list(lm.adapters) == ["dora", "all", "few"]
    tokens = [*first.tokens, *(token for piece in pieces for token in piece.tokens)]
    assert tuple(tokens) == before[1][0]


def test_a_number_that_is_free_again_is_another_adapters(model, tmp_path):
    lm = LanguageModel(model("opt").config, model("opt").params, model("opt").backend)
    for name in "ab":
        lm.load_adapter(name, write_adapter(tmp_path / name, lm.config, ord(name)))
    second = np.asarray(lm.logits(PROMPTS[1:2], adapter="b"))
    lm.unload_adapter("a")
    np.testing.assert_array_equal(lm.logits(PROMPTS[1:2], adapter="b"), second)
    lm.load_adapter("c", write_adapter(tmp_path / "c", lm.config, ord("a")))
    assert lm.loaded_adapters.numbers(["c", "b", None], 3) == [1, 2, 0]
    lm.unload_adapter("b")
    lm.unload_adapter("c")
    # Whatever is put in their place.
    lm.params = dict(lm.params)
    assert lm.adapted_params is lm.params


@pytest.mark.exhaustive
def test_thirty_two_adapters_in_a_batch_of_thirty_two(tmp_path):
    """Each row has the bits that it has alone, and the logits of the model with its adapter merged."""
    lm = random_model("opt")
    names = [str(number) for number in range(32)]
    for seed, name in enumerate(names):
        lm.load_adapter(name, write_adapter(tmp_path / name, lm.config, seed, (2, 8, 16)[seed % 3]))
    prompts = [[*PROMPTS[0][:19], 1 + seed % 15] for seed in range(32)]
    asked = {"max_new_tokens": 16, "sampling": SamplingParams(logprobs=True, ignore_eos=True)}
    together = lm.generate(prompts, **asked, adapter=names, batch_size=32)
    live = np.asarray(lm.logits(prompts, adapter=names))
    for row, name in enumerate(names):
        (alone,) = lm.generate(prompts[row : row + 1], **asked, adapter=name)
        assert (alone.tokens, alone.logprobs) == (together[row].tokens, together[row].logprobs)
        merged, _ = lm.loaded_adapters.merged(name)
        (found,) = np.asarray(_logits(lm, merged, prompts[row]))
        np.testing.assert_allclose(live[row], found, atol=1e-4)
    assert len({result.tokens for result in together}) > 16


def _logits(lm, params, ids):
    """Return logits with other parameters, by programs that are there."""
    tokens_BT = np.zeros((1, 32), np.int32)
    tokens_BT[0, : len(ids)] = ids
    found = lm.programs.logits(params, tokens_BT, np.array([len(ids)], np.int32), np.zeros(1, np.int32))
    return found[:, : len(ids)]


def test_what_names_no_adapter_or_can_only_be_merged_is_refused_by_one_line(model, tmp_path):
    lm = model("opt")
    for asked, message in (
        ({"adapter": "other"}, "no adapter 'other' is loaded; loaded are: dora, all, few"),
        ({"adapter": ["all", "few"]}, "2 adapters for 1 prompts"),
        ({"adapter": 3}, "adapter 3 is neither a name nor a list of names"),
    ):
        with pytest.raises(InvalidOption, match=message):
            lm.loaded_adapters.numbers(asked["adapter"], 1)
    for name, message in (("all", "is loaded already"), ("", "not a text of 1"), ("a\nb", "not a text of 1")):
        with pytest.raises(InvalidOption, match=message):
            lm.load_adapter(name, lm.adapters["all"])
    positions = {"model.decoder.embed_positions.weight": np.ones((258, 32), np.float32)}
    head = {"lm_head.lora_A.weight": np.ones((4, 32)), "lm_head.lora_B.weight": np.ones((16, 4))}
    head |= {"lm_head.lora_magnitude_vector": np.ones(16)}
    for settings, tensors, tensor in (
        ({"modules_to_save": ["embed_positions"]}, positions, "embed_positions.weight"),
        ({"use_dora": True, "target_modules": ["lm_head"]}, head, "lm_head.weight"),
    ):

        def edit(written, stored, settings=settings, tensors=tensors):
            written |= settings
            if "use_dora" in settings:
                stored.clear()
            stored |= {PREFIX + name: values.astype(np.float32) for name, values in tensors.items()}

        folder = edit_adapter(write_adapter(tmp_path / tensor, lm.config, only=("mlp.up",)), edit)
        with pytest.raises(UnsupportedModel, match=f"{tensor}, which can only be merged: jaxinfer convert"):
            lm.load_adapter("other", folder)
    with pytest.raises(InvalidOption, match="no adapter 'gone'"):
        lm.unload_adapter("gone")
    with lm.engine(max_rows=1, pages=40, page_size=8), pytest.raises(InvalidOption, match="has an engine that runs"):
        lm.unload_adapter("all")
    assert jax.tree.structure(lm.params) == jax.tree.structure(random_model("opt").params)
