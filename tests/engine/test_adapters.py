"""The engine serves each request by its own adapter, whatever runs beside it and whatever pages are kept."""

from types import SimpleNamespace

import pytest

import jaxinfer
from jaxinfer import SamplingParams
from jaxinfer.cache.layouts import PagedLayout
from jaxinfer.decoding.registry import parse_strategy
from jaxinfer.engine.core import EngineCore, cache_salt_of, salt_of
from jaxinfer.engine.kept_pages import KeptPages
from jaxinfer.errors import InvalidOption
from tests.decoding.covered_models import random_model
from tests.toy_adapters import write_adapter
from tests.toys import encode_bytes

OPTIONS = {"max_rows": 2, "page_size": 8, "prefill_chunk": 16, "steps_per_look": 4, "drafting": "always"}
PROMPT = encode_bytes("The old badger watched the moon and the river")
NAMES = (None, "a", "b", "a")
SAMPLING = SamplingParams(temperature=0.9, seed=3, logprobs=True, ignore_eos=True)


@pytest.fixture(scope="module")
def lm(trained_folder, tmp_path_factory):
    model = jaxinfer.load(trained_folder, max_len=128)
    for seed, name in enumerate("ab"):
        model.load_adapter(name, write_adapter(tmp_path_factory.mktemp(name), model.config, seed, 4))
    return model


@pytest.fixture(scope="module")
def alone(lm):
    asked = {"max_new_tokens": 24, "sampling": SAMPLING}
    return {name: fields(lm.generate([PROMPT], **asked, adapter=name)[0]) for name in {*NAMES}}


def fields(result):
    return result.tokens, result.logprobs


@pytest.mark.exhaustive
@pytest.mark.parametrize("preemption", ["recompute", "offload"])
def test_requests_that_share_a_prompt_and_make_room_are_those_of_each_adapter(lm, alone, preemption):
    """There are pages for little more than one text, so that requests make room for each other."""
    pages = -(-(len(PROMPT) + 24) // 8) + 4
    with lm.engine(**OPTIONS, pages=pages, preemption=preemption) as engine:
        requests = [engine.submit(PROMPT, max_new_tokens=24, sampling=SAMPLING, adapter=name) for name in NAMES]
        found = [fields(request.result()) for request in requests]
        assert engine.metrics().preemptions > 0
    assert found == [alone[name] for name in NAMES]
    assert len(set(found)) == 3


@pytest.mark.slow
@pytest.mark.optimised  # as the tests of full products are, with which it shares what is decoded alone
def test_pages_are_found_again_by_the_same_adapter_alone(lm, alone):
    with lm.engine(**OPTIONS, pages=60) as engine:
        cached = []
        for name in (None, "a", "b", "a", None):
            request = engine.submit(PROMPT, max_new_tokens=24, sampling=SAMPLING, adapter=name)
            assert fields(request.result()) == alone[name]
            cached.append(request.stats.cached_tokens > 0)
        assert cached == [False, False, False, True, True]
        with engine.prefix(PROMPT, adapter="b"):
            pass
        with pytest.raises(InvalidOption, match="no adapter 'c' is loaded"):
            engine.submit(PROMPT, adapter="c")


@pytest.mark.exhaustive
def test_rows_that_are_refilled_and_pages_that_are_kept_are_each_adapters(lm, alone):
    asked = {"max_new_tokens": 24, "sampling": SAMPLING}
    found = lm.generate([PROMPT] * 4, **asked, adapter=list(NAMES), batch_size=2)
    assert [fields(result) for result in found] == [alone[name] for name in NAMES]
    for name in (*NAMES, "b"):
        assert fields(lm.generate([PROMPT], **asked, adapter=name, reuse=True)[0]) == alone[name]
    lm.load_adapter("c", lm.adapters["a"])
    assert fields(lm.generate([PROMPT], **asked, adapter="c", reuse=True)[0]) == alone["a"]
    lm.unload_adapter("c")
    with lm.prefix(PROMPT):
        assert fields(lm.generate([PROMPT], **asked, adapter="b")[0]) == alone["b"]


@pytest.mark.exhaustive
def test_a_prefix_is_of_its_adapter_which_stays_as_long(lm, alone):
    asked = {"max_new_tokens": 24, "sampling": SAMPLING}
    with lm.prefix(PROMPT[:24], adapter="b"):
        found = []
        for name in (None, "b"):
            before = lm._kept_pages.cached_tokens
            assert fields(lm.generate([PROMPT], **asked, adapter=name)[0]) == alone[name]
            found.append(lm._kept_pages.cached_tokens - before)
        assert found[0] == 0 < found[1]
        with pytest.raises(InvalidOption, match="a prefix of adapter 'b' is held: release it first"):
            lm.unload_adapter("b")
    origin = lm.adapters["b"]
    lm.unload_adapter("b")
    lm.load_adapter("b", origin)


def test_a_prefix_is_computed_with_its_adapter(monkeypatch):
    added = []

    def add(sequence):
        added.append((sequence.tokens, sequence.adapter))
        sequence.origin.request.finish()

    core = EngineCore.__new__(EngineCore)  # that runs nothing
    core.scheduler = SimpleNamespace(held=SimpleNamespace(pinned=()))
    core.add, core.release = add, lambda name: None
    programs = random_model("opt").programs.beside(PagedLayout())
    monkeypatch.setattr(KeptPages, "_make_core", lambda *_: core)
    pages = KeptPages(programs, max_len=90, eos_token_ids=tuple, tokenizer=lambda: None)
    strategy, params = parse_strategy("autoregressive"), {}
    with pages.hold(params, [3, 4], strategy, adapter=2):
        assert (pages.holds_of(2), pages.holds_of(0)) == (True, False)
        with pages.hold(params, [5], strategy):
            assert pages.holds_of(0)
    assert not pages.holds_of(2)
    # The second one begins with pages that have room for both.
    assert added[0] == ([3, 4], 2)
    assert set(map(str, added)) == {"([3, 4], 2)", "([5], 0)"}


def test_what_pages_depend_on_tells_adapters_apart():
    names = {salt_of("0", salt, adapter) for salt in ("", "1", ";1") for adapter in (0, 1, 2, 12)}
    assert len(names) == 12
    assert cache_salt_of(salt_of("0", "mine/yours", 3)) == "mine/yours"
    assert salt_of("0", "") == salt_of("0", "", 0)
