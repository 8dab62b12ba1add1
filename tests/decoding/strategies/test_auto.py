"""`auto` drafts with what there is for the weights, changes no token, and knows from before what steps cost."""

import itertools
import json
import time
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxinfer
from jaxinfer import LanguageModel, SamplingParams
from jaxinfer.checkpoint.drafters import shipped
from jaxinfer.cli.output.start_table import start_lines
from jaxinfer.decoding.batch import Request
from jaxinfer.decoding.programs import Programs
from jaxinfer.decoding.strategies.auto import Auto
from jaxinfer.decoding.strategies.medusa import Medusa
from jaxinfer.decoding.strategies.prompt_lookup import PromptLookup
from jaxinfer.decoding.strategy import Target
from jaxinfer.engine.device import Device, by_nodes
from jaxinfer.engine.pace import Pace
from jaxinfer.errors import InvalidOption
from jaxinfer.models.few_bits import in_few_bits
from jaxinfer.ops.few_bits.formats import INT8, int4
from jaxinfer.ops.few_bits.quantized_array import is_quantized
from tests.decoding.rows import run
from tests.engine.harness import SMALL, Arrival, Harness
from tests.toys import TINY_LLAMA, encode_bytes, float32_backend, random_params

PROMPTS = ["The old otter", "One grey", "A small fox and"]
SAMPLING = SamplingParams(temperature=1.3, top_p=0.5, seed=3, ignore_eos=True)


@pytest.fixture(scope="module")
def lm(trained_folder, tmp_path_factory):
    """A model whose programs and costs are kept."""
    lm = jaxinfer.load(trained_folder, max_len=200, kept=tmp_path_factory.mktemp("kept"))
    if not lm.programs.decoder.backend.keeps_bits:
        pytest.skip("no kernels of our own for this processor")
    return lm


@pytest.fixture
def nodes(monkeypatch):
    """The numbers of nodes of the windows that run."""
    seen, start = [], Device.start

    def watched(device, slots, pages, max_steps, nodes=None):
        seen.append(nodes)
        return start(device, slots, pages, max_steps, nodes)

    monkeypatch.setattr(Device, "start", watched)
    return seen


def tokens(results):
    return [result.tokens for result in results]


@pytest.mark.exhaustive
def test_texts_of_a_batch_are_those_of_plain_decoding_and_of_more_prompts_than_it_holds(lm, nodes):
    plain = lm.generate(PROMPTS, max_new_tokens=40, sampling=SAMPLING)
    assert nodes == []
    sizes = itertools.cycle((16, 16, 2))
    ends = time.monotonic() + 120
    while not {1, 4, 8} <= set(nodes) and time.monotonic() < ends:
        batch_size = next(sizes)
        found = lm.generate(PROMPTS, max_new_tokens=40, sampling=SAMPLING, strategy="auto", batch_size=batch_size)
        assert tokens(found) == tokens(plain)
        lm.programs.settle()
    # Plain steps are compiled first; drafts follow, in the background.
    assert nodes[0] == 1
    assert {1, 4, 8} <= set(nodes)


@pytest.mark.slow
def test_what_steps_cost_is_known_from_the_last_process(lm, trained_folder, nodes, monkeypatch):
    strategy, kept = lm.resolve("auto"), lm.programs.kept.folder.path
    plain = lm.generate(PROMPTS[0], max_new_tokens=60, sampling=SAMPLING)[0]
    widths, ends = (1, 4, 8), time.monotonic() + 120
    assert nodes == []
    # Smaller programs are compiled while the largest one runs.
    while len(lm._kept_pages.kept_pace.of(strategy, widths).costs().get("0", {})) < 3 and time.monotonic() < ends:
        *_, last = lm.stream(PROMPTS[0], max_new_tokens=60, sampling=SAMPLING, strategy="auto")
        assert last.result.tokens == plain.tokens
    assert set(nodes) == set(widths)
    costs = lm._kept_pages.kept_pace.of(strategy, widths).costs()
    assert sorted(costs["0"]) == ["1", "4", "8"]
    (file,) = kept.glob("*.pace")
    assert set(json.loads(file.read_bytes())["0"]) == {"1", "4", "8"}
    again = jaxinfer.load(trained_folder, max_len=200, kept=kept.parent)
    found = again._kept_pages.kept_pace.of(again.resolve("auto"), widths).costs()
    assert set(found["0"]) == {"1", "4", "8"}
    # What is known is hardly tried: drafts that were seen to be dear are left out at first, and then tried once.
    dear = {power: {"1": 1e-9, "4": 1.0, "8": 1.0} for power in costs}
    file.write_text(json.dumps(dear))
    del nodes[:]
    # However busy the machine is, the text does not end before the program of one node is there.
    monkeypatch.setattr(Programs, "prepare_soon", Programs.prepare)
    again = jaxinfer.load(trained_folder, max_len=200, kept=kept.parent)
    result = again.generate(PROMPTS[0], max_new_tokens=60, sampling=SAMPLING, strategy="auto")[0]
    assert result.tokens == plain.tokens
    # The start-up table counts the engine's programs, of which there are no others here.
    (line,) = (line for line in start_lines(again, 0.0, 0.0, None) if line.startswith("programs"))
    assert " 0 read, 0 compiled" not in line
    # The first window came before the program of one node; then both others are tried once.
    assert nodes.count(1) >= len(nodes) - 3
    file.write_text("{")
    again = jaxinfer.load(trained_folder, max_len=200, kept=kept.parent)
    assert again._kept_pages.kept_pace.of(again.resolve("auto"), widths).costs() == {}


@pytest.mark.parametrize(
    "costs", [{"0": {"3": 1.0}}, {"x": {"1": 1.0}}, {"0": {"1": -1.0}}, {"0": {"1": float("inf")}}, {"0": 3}, [], None]
)
def test_costs_that_no_run_has_written_are_not_taken_over(costs):
    pace = Pace((1, 8))
    assert not pace.begin_with(costs)
    assert pace.costs() == {}


def test_it_drafts_with_the_heads_that_come_for_the_weights(monkeypatch, trained_model, tmp_path):
    assert [part.name for part in trained_model.resolve("auto").parts] == ["token_recycling", "prompt_lookup"]
    heads = tmp_path / "some-model" / "heads"
    heads.mkdir(parents=True)
    (heads / "heads.json").write_text(json.dumps({"base_fingerprint": trained_model.base_fingerprint}))
    monkeypatch.setattr(shipped, "DRAFTERS", tmp_path)
    # They are looked for there, and there is nothing else in this folder.
    with pytest.raises(Exception, match="heads"):
        trained_model.resolve(Auto(nodes=6))


def test_it_is_no_part_of_a_sum():
    with pytest.raises(InvalidOption, match="cannot be part of a sum"):
        jaxinfer.decoding.registry.parse_strategy("auto+suffix")
    assert Auto().adapts


@pytest.fixture(scope="module")
def stored():
    """A model whose weights are those that a file in four bits would hold."""
    config = replace(TINY_LLAMA, num_layers=1)
    params = in_few_bits(random_params(config), int4(32, False), "toy")
    params = jax.tree.map(lambda leaf: leaf.dequantize() if is_quantized(leaf) else leaf, params, is_leaf=is_quantized)
    return LanguageModel(config, params, float32_backend())


@pytest.fixture(scope="module")
def drafters():
    """Heads that know nothing, and the text."""
    rng, width = np.random.default_rng(0), TINY_LLAMA.model_dim
    kernels = [jnp.asarray(rng.normal(size=(width, width)), jnp.float32) for _ in range(3)]
    heads = {"heads": tuple({"blocks": ({"kernel": kernel, "bias": jnp.zeros(width)},)} for kernel in kernels)}
    return Medusa(params=heads, paths=((0,), (0, 0), (1,), (0, 0, 0), (2,))), PromptLookup()


def test_where_rows_cost_time_weights_in_four_bits_are_read_for_a_few_nodes_or_for_many(drafters):
    config, backend = replace(TINY_LLAMA, num_layers=1), float32_backend()
    whole = random_params(config)
    few, bytes_ = (in_few_bits(whole, form, "toy") for form in (int4(32, False), INT8))
    own, rounded, in_bytes, on_chip = (
        Auto(drafters).resolve(Target(config, replace(backend, platform=platform), params))
        for params, platform in ((whole, "cpu"), (few, "cpu"), (bytes_, "cpu"), (few, "tpu"))
    )
    nodes = [[each.nodes for each in one.narrower] for one in (own, rounded, in_bytes, on_chip)]
    assert nodes == [[4], [3], [4], [16, 8, 4]]
    assert [each.nodes for each in replace(rounded, nodes=32).narrower] == [16, 8, 3]
    # Fewer nodes ask fewer heads, of a tree that nobody has named.
    assert [each.narrower[-1].parts[0].max_depth for each in (own, rounded)] == [3, 2]
    assert rounded.parts[0].max_depth == 3
    named = replace(rounded, parts=(replace(rounded.parts[0], tree="chain:3"), *rounded.parts[1:]))
    assert named.narrower[0].parts == named.parts


@pytest.mark.slow
def test_windows_of_few_nodes_and_of_many_share_what_drafters_remember(drafters, nodes):
    config = replace(TINY_LLAMA, num_layers=1)
    lm = LanguageModel(config, in_few_bits(random_params(config), int4(32, False), "toy"), float32_backend())
    made = Harness(lm, lm.resolve(Auto(drafters, weights="none")), replace(SMALL, max_rows=2, pages=40))
    requests = [Request(encode_bytes(prompt), 60, replace(SAMPLING, seed=len(prompt))) for prompt in PROMPTS]
    found = [each.tokens for each in made.serve([Arrival(0, request) for request in requests])]
    assert {1, 3, 8} <= set(nodes)
    assert found == [[*one.prompt, *row.tokens] for one, row in zip(requests, run(lm, requests))]


def test_a_model_that_has_no_more_than_four_bits_decodes_ahead_in_these(stored, trained_model):
    """Whoever names weights gets them, whoever wants none gets none."""
    plain = LanguageModel(TINY_LLAMA, random_params(TINY_LLAMA), float32_backend())
    assert plain.resolve("auto").ahead is None
    assert plain.resolve("auto:weights=int8").ahead.weights == "int8"
    # Its kernels are too narrow for groups.
    assert trained_model.resolve("auto").ahead is None
    assert stored.resolve("auto:weights=none").ahead is None
    strategy = stored.resolve("auto:nodes=16")
    assert (strategy.ahead.weights, strategy.ahead.drafter.nodes) == ("int4:group=32", 4)
    # They share what the drafters remember, and a window of either is known by its number of nodes.
    assert strategy.ahead.drafter.parts == strategy.parts
    assert list(by_nodes(strategy, stored.backend)) == [1, 4, 8, 16, 17]
    assert strategy.headroom >= strategy.ahead.headroom
    assert strategy.max_depth == strategy.ahead.max_depth
    for spec in ("auto:weights=int9", "auto:weights=gguf"):
        with pytest.raises(InvalidOption):
            stored.resolve(spec)


@pytest.mark.slow
def test_the_text_is_that_of_plain_decoding_whoever_decodes_ahead(stored, monkeypatch):
    """Windows of each kind follow each other."""
    made = Harness(stored, stored.resolve("auto"), replace(SMALL, max_rows=2, pages=40))
    requests = [Request(encode_bytes(prompt), 60, replace(SAMPLING, seed=len(prompt))) for prompt in PROMPTS]
    seen, start = [], Device.start

    def watched(device, slots, pages, max_steps, nodes=None):
        seen.append(nodes)
        return start(device, slots, pages, max_steps, nodes)

    monkeypatch.setattr(Device, "start", watched)
    found = [each.tokens for each in made.serve([Arrival(0, request) for request in requests])]
    assert {1, 8, 13} <= set(seen)
    assert found == [[*one.prompt, *row.tokens] for one, row in zip(requests, run(stored, requests))]
