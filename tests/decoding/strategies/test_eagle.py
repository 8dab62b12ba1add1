"""EAGLE drafts what the published modules would from the target's features, whoever drafted the tokens before."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, reduce
from operator import getitem
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import jaxinfer
from jaxinfer import LanguageModel, SamplingParams
from jaxinfer.decoding.batch import Request, RunningBatch
from jaxinfer.decoding.registry import parse_strategy
from jaxinfer.decoding.strategies import eagle as eagle_module
from jaxinfer.decoding.strategies.eagle import Eagle
from jaxinfer.decoding.strategies.sum_of_drafters import SumOfDrafters
from jaxinfer.decoding.strategy import Proposal
from jaxinfer.errors import CheckpointNotFound, InvalidCheckpoint, InvalidOption
from jaxinfer.models.drafters.eagle import default_features, fused
from jaxinfer.models.model import Model
from jaxinfer.ops.few_bits.quantized_array import QuantizedArray
from tests.cache.test_features import expected
from tests.decoding.fitted_eagle import fit_eagle
from tests.decoding.fitted_heads import best_paths, multiplied
from tests.decoding.published_eagle import PublishedDrafter, write_published
from tests.ops.rounded_in_groups import rounded_in_groups
from tests.toys import fable_tokens

PROMPTS = (fable_tokens(3), fable_tokens(1, 5)[:2], fable_tokens(2, 9))
IDS = (*range(40, 90), *range(99, 125))


@pytest.fixture(scope="module")
def folders(trained_model, tmp_path_factory):
    """Published drafters for the trained toy, by name."""
    root, sizes = tmp_path_factory.mktemp("eagle"), (trained_model.config.model_dim, trained_model.config.vocab_size)
    return {
        "eagle3": write_published(root / "3", *sizes, 3, IDS, extras=("qk_norm", "bias")),
        "whole": write_published(root / "whole", *sizes, 3),
        "eagle1": write_published(root / "1", *sizes, None),
        "eagle3.1": write_published(
            root / "3.1", *sizes, 3, IDS, extras=("fc_norm",), norm_output=True, fc_norm=True, norm_before_residual=True
        ),
        "speculators": write_published(
            root / "speculators",
            *sizes,
            3,
            IDS,
            extras=("input_norm", "speculators"),
            norm_before_fc=True,
            eagle_aux_hidden_state_layer_ids=[0, 1, 2],
        ),
    }


def run_some(lm: LanguageModel, strategy: Any, steps: int) -> RunningBatch:
    """Decode the prompts for a few steps."""
    requests = [Request(prompt, len(prompt) + 40, SamplingParams(temperature=0.7, seed=4)) for prompt in PROMPTS]
    batch = RunningBatch(lm.programs, lm.params, strategy, requests, (), 256)
    batch.advance(steps)
    return batch


def texts_of(batch: RunningBatch) -> list[list[int]]:
    state = batch._state
    return [np.asarray(state.tokens_BS[row, : state.lengths_B[row]]).tolist() for row in range(len(PROMPTS))]


def drafts_of(lm: LanguageModel, strategy: Eagle, batch: RunningBatch, memory: Any) -> list[dict[tuple, float]]:
    """Return each row's next tree: the paths below the root, with the chances that it gives them."""
    proposal: Proposal = _proposing(lm.programs.decoder, strategy)(lm.params, strategy.parameters, batch._state, memory)
    tokens_BM, parents_BM, chances_BM = map(np.asarray, (*proposal.tree[:2], proposal.chances_BM))
    found = []
    for tokens_M, parents_M, chances_M in zip(tokens_BM, parents_BM, chances_BM):
        paths: list[tuple] = [()]
        for node in range(1, len(tokens_M)):
            paths.append((*paths[parents_M[node]], int(tokens_M[node])))
        found.append(dict(zip(paths[1:], chances_M[1:].tolist())))
    return found


@cache
def _proposing(decoder: Any, strategy: Eagle) -> Any:
    return jax.jit(lambda params, mine, state, memory: strategy.propose(Model(decoder, params), mine, state, memory))


def published_trees(
    lm: LanguageModel,
    strategy: Eagle,
    texts: Sequence[Sequence[int]],
    matrices: Mapping[str, np.ndarray] = {},
    rounded: Callable[[Any], np.ndarray] = np.asarray,
) -> list[dict[tuple[int, ...], float]]:
    """Return what the module of the strategy's folder drafts after texts, with other ``matrices`` if given."""
    tensors = {**load_file(f"{strategy.heads}/model.safetensors"), **matrices}
    settings = json.loads(Path(strategy.heads, "config.json").read_text())
    tables = np.asarray(lm.params["embed"]["embedding"])
    features_BTF = expected(lm, [list(text) for text in texts], strategy.features)
    if not strategy.shape.fuses:
        features_BTF = np.asarray(Model(lm.programs.decoder, lm.params).normed(jnp.asarray(features_BTF)))
    ids = np.asarray(strategy.params.get("ids", np.arange(lm.config.vocab_size)))
    found = []
    for row, text in enumerate(texts):
        drafter = PublishedDrafter(tensors, tables, features_BTF[row], text, settings, rounded)

        def log_p_after(path: tuple[int, ...], drafter: PublishedDrafter = drafter) -> np.ndarray:
            output = strategy.params.get("output")
            logits_U = logits_of(lm, output, drafter.output_after(path))
            log_p_V = np.full(lm.config.vocab_size, -1e9)
            log_p_V[ids] = logits_U - np.log(np.exp(logits_U - logits_U.max()).sum()) - logits_U.max()
            return log_p_V

        found.append({path: np.exp(score) for path, score in best_paths(strategy.growth, log_p_after).items()})
    return found


def logits_of(lm: LanguageModel, output: Any, output_D: np.ndarray) -> np.ndarray:
    if output is None:
        table = lm.params["embed"]["embedding"] if lm.config.tied_embeddings else lm.params["head"]["kernel"]
        return np.asarray(table) @ output_D
    return multiplied(output["kernel"], output_D)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("eagle3", marks=pytest.mark.slow),
        pytest.param("eagle3.1", marks=pytest.mark.exhaustive),
        pytest.param("speculators", marks=pytest.mark.exhaustive),
        pytest.param("eagle1", marks=pytest.mark.exhaustive),
        pytest.param("whole", marks=pytest.mark.exhaustive),
    ],
)
def test_it_drafts_what_the_published_module_does_after_others_drafts_were_taken(
    trained_model, folders, monkeypatch, name
):
    """Rows of different lengths, one of them hardly begun; a step takes up to six tokens that it did not draft."""
    monkeypatch.setattr(eagle_module, "matrices_in_four_bits", lambda params, backend: params)
    spec = f"eagle:heads={folders[name]},tree=dynamic:8,depth=3+prompt_lookup:num_draft_tokens=6,min_ngram=1"
    strategy = trained_model.resolve(parse_strategy(spec))
    assert isinstance(strategy, SumOfDrafters)
    eagle: Any = strategy.parts[0]
    for steps in (0, 8):
        batch = run_some(trained_model, strategy, steps)
        assert not steps or sum(batch.counts(row).accepted for row in range(3)) > 3
        found = drafts_of(trained_model, eagle, batch, batch._memory.memories[0])
        assert max(len(path) for drafted in found for path in drafted) == 3
        for drafted, wanted in zip(found, published_trees(trained_model, eagle, texts_of(batch))):
            assert len(drafted) == 7
            np.testing.assert_allclose(sorted(drafted.values()), sorted(wanted.values()), rtol=2e-2)
            assert len(drafted.keys() & wanted.keys()) >= 6  # chances that are equal may change places
            for path in drafted.keys() & wanted.keys():
                np.testing.assert_allclose(drafted[path], wanted[path], rtol=2e-2)


# The drafter's matrices by the names of the files.
MATRICES = {
    "fc": ("fc",),
    **{f"self_attn.{name[0]}_proj": ("attention", name) for name in ("query", "key", "value", "output")},
    **{f"mlp.{name}_proj": ("mlp", name) for name in ("gate", "up", "down")},
}


@pytest.mark.parametrize("num_features", [3, pytest.param(None, marks=pytest.mark.exhaustive)])
def test_on_a_cpu_it_drafts_what_the_module_does_with_matrices_in_four_bits(tiny_llama_folder, tmp_path, num_features):
    """EAGLE-3 and EAGLE-1; what the matrices are multiplied by is rounded too."""
    lm = jaxinfer.load(tiny_llama_folder())
    sizes = lm.config.model_dim, lm.config.vocab_size
    folder = write_published(tmp_path / "d", *sizes, num_features, IDS if num_features else (), ffn=64)
    strategy: Any = lm.resolve(f"eagle:heads={folder},tree=dynamic:8,depth=3")
    matrices, layer = {}, "midlayer." if num_features else "layers.0."
    for name, path in MATRICES.items():
        matrix = reduce(getitem, path, strategy.params)["kernel"]
        assert isinstance(matrix, QuantizedArray), name
        assert matrix.form.bits == 4
        matrices["fc.weight" if name == "fc" else f"{layer}{name}.weight"] = np.asarray(matrix.dequantize())
    batch = run_some(lm, strategy, 4)
    found = drafts_of(lm, strategy, batch, batch._memory)
    for drafted, wanted in zip(found, published_trees(lm, strategy, texts_of(batch), matrices, rounded_in_groups)):
        assert len(drafted.keys() & wanted.keys()) >= 6
        for path in drafted.keys() & wanted.keys():
            np.testing.assert_allclose(drafted[path], wanted[path], rtol=2e-2)


@pytest.fixture(scope="module")
def fitted(trained_model) -> Eagle:
    shape, params = fit_eagle(trained_model, [fable_tokens(12, seed) for seed in range(4)])
    return Eagle(shape=shape, params=params)


@pytest.mark.parametrize("tree", [pytest.param(tree, marks=pytest.mark.exhaustive) for tree in ("dynamic:8", "3.2.1")])
def test_after_some_steps_it_drafts_as_one_that_begins_on_the_same_text(trained_model, fitted, tree):
    """Of its drafts some were taken and some not, more in one row than in another."""
    strategy: Any = trained_model.resolve(replace(fitted, tree=tree))
    batch = run_some(trained_model, strategy, 5)
    taken = [batch.counts(row).accepted for row in range(3)]
    assert sum(taken) > 3
    assert len(set(taken)) > 1
    requests = [
        Request(text[:-1], len(text) + 30, SamplingParams(logit_bias={text[-1]: 100.0})) for text in texts_of(batch)
    ]
    anew = RunningBatch(trained_model.programs, trained_model.params, strategy, requests, (), 256)
    assert texts_of(anew) == texts_of(batch)
    found, wanted = (drafts_of(trained_model, strategy, each, each._memory) for each in (batch, anew))
    for mine, fresh in zip(found, wanted):
        assert mine.keys() == fresh.keys()
        np.testing.assert_allclose([mine[path] for path in fresh], list(fresh.values()), rtol=1e-3)


@pytest.mark.exhaustive
def test_a_good_drafter_gives_more_tokens_a_step(trained_model, fitted):
    results = [
        trained_model.generate(list(PROMPTS), strategy=strategy, max_new_tokens=30)
        for strategy in ("autoregressive", replace(fitted, tree="dynamic:8"))
    ]
    assert [result.tokens for result in results[0]] == [result.tokens for result in results[1]]
    assert sum(result.stats.steps for result in results[1]) < 0.8 * sum(result.stats.steps for result in results[0])


@pytest.mark.exhaustive
def test_a_shared_prefix_leaves_the_same_features_to_draft_from(trained_model, fitted):
    """The same prompt again, of whose pages all but the last are there already: as many drafts are taken."""
    prompt = fable_tokens(3)
    with trained_model.engine(strategy=replace(fitted, tree="dynamic:8"), page_size=8, drafting="always") as engine:
        found = []
        for _ in range(2):
            request = engine.submit(prompt, max_new_tokens=40)
            result = request.result()
            found.append((request.stats.cached_tokens, result.tokens, result.stats.steps, result.stats.accepted))
    (first_cached, *first), (cached, *second) = found
    assert first_cached == 0
    assert cached > len(prompt) // 2
    assert first == second
    assert second[1] < 0.8 * len(second[0])


def test_features_are_of_a_low_a_middle_and_a_high_layer():
    assert [default_features(layers) for layers in (2, 7, 30, 32)] == [(0, 1, 2), (2, 3, 4), (2, 15, 27), (2, 16, 29)]


REFUSED = {
    "another width": ({"width": 64}, "shape|hidden channels|wide"),
    "another vocabulary": ({"vocab_size": 300}, "knows 300 tokens"),
    "two layers": ({"num_hidden_layers": 2}, "num_hidden_layers is 2; only 1"),
    "no tensor": ({"tensors": {"midlayer.hidden_norm.weight": None}}, "no EAGLE drafter"),
    "another shape": ({"tensors": {"midlayer.mlp.up_proj.weight": np.zeros((4, 4), np.float32)}}, r"shape \[4, 4\]"),
    "a further tensor": ({"tensors": {"fc_norm.0.weight": np.zeros(4, np.float32)}}, "no place for tensor fc_norm"),
    "ids past the end": ({"tensors": {"d2t": np.full(len(IDS), 999)}}, "d2t does not lead to"),
    "layers past the end": ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 99]}}, "must list layers below"),
    "norms that are not there": ({"fc_norm": True}, "needs tensor fc_norm.0.weight, which is missing"),
    "norms twice": ({"fc_norm": True, "norm_before_fc": True}, "fc_norm and norm_before_fc are two norms"),
    "a flag of no kind": ({"norm_output": 1}, "norm_output must be true or false, not 1"),
    "nothing described": ({"transformer_layer_config": 3}, "transformer_layer_config must be an object"),
    "other features": ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1]}}, "fc.weight has shape"),
    "other weights": ({"base_fingerprint": "0123"}, "is for the weights 0123"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_drafter_for_the_model_is_refused_by_one_line(trained_model, tmp_path, name):
    changes, message = REFUSED[name]
    sizes = {"width": trained_model.config.model_dim, "vocab_size": trained_model.config.vocab_size}
    folder = write_published(tmp_path / "drafter", **{**sizes, "num_features": 3, "ids": IDS, **changes})
    with pytest.raises(InvalidCheckpoint, match=message) as problem:
        trained_model.resolve(f"eagle:heads={folder}")
    assert "\n" not in str(problem.value)


@pytest.mark.parametrize("form", ["fc_norm", "input_norm"])
def test_features_are_normed_before_they_are_joined_as_the_file_says(trained_model, tmp_path, form):
    """Each layer's by itself, or all as one vector, in either library's format."""
    flags = {"fc_norm": True, "norm_output": True} if form == "fc_norm" else {"norm_before_fc": True}
    extras = (form, "speculators") if form == "input_norm" else (form,)
    layers = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]} if form == "input_norm" else {}
    sizes = trained_model.config.model_dim, trained_model.config.vocab_size
    folder = write_published(tmp_path / "drafter", *sizes, 3, IDS, extras=extras, **flags, **layers)
    strategy = trained_model.resolve(f"eagle:heads={folder}")
    assert isinstance(strategy, Eagle)
    assert strategy.shape is not None
    assert strategy.params is not None
    assert (strategy.shape.layers, strategy.shape.norm_output) == ((0, 1, 2), form == "fc_norm")
    features_1TF = np.random.default_rng(5).standard_normal((1, 4, 3 * sizes[0])).astype(np.float32) * 7
    found = fused(strategy.shape, strategy.params, jnp.asarray(features_1TF), trained_model.backend)
    tensors = load_file(f"{folder}/model.safetensors")
    joined = PublishedDrafter(tensors, np.zeros((1, 1)), features_1TF[0], [0])._before_fc(features_1TF[0])
    weights = next(array for name, array in tensors.items() if name.endswith("fc.weight"))
    np.testing.assert_allclose(np.asarray(found)[0], joined @ weights.T, rtol=1e-3, atol=1e-4)


def test_what_is_missing_is_told(trained_model, folders, tmp_path):
    for spec, message in (
        ("eagle", "no EAGLE drafters come with the package for these weights .*: name a folder, heads=FOLDER"),
        (f"eagle:heads={folders['eagle3']},tree=77.1", "asks for rank 76"),
        (f"eagle:heads={folders['eagle3']},tree=dynamic:400,depth=2", "grow at most"),
    ):
        with pytest.raises(InvalidOption, match=message):
            trained_model.resolve(spec)
    with pytest.raises(CheckpointNotFound, match="no such folder"):
        trained_model.resolve(f"eagle:heads={tmp_path / 'nowhere'}")
    pickled = write_published(tmp_path / "p", trained_model.config.model_dim, trained_model.config.vocab_size, 3)
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    with pytest.raises(
        InvalidCheckpoint,
        match=r"pickled weights can run any code.*convert them by the line in jaxinfer/checkpoint/README.md",
    ):
        trained_model.resolve(f"eagle:heads={pickled}")
