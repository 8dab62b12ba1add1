"""A value head on disk comes back as it was; a search by it is the search by a function that asks it about texts."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxinfer import Candidate, LanguageModel, SamplingParams
from jaxinfer.checkpoint.value_head import read_value_head, write_value_head
from jaxinfer.decoding.strategies.mcts import TreeSearch
from jaxinfer.errors import InvalidCheckpoint, JaxinferError
from jaxinfer.models.value_head import init_value_head
from jaxinfer.parallel.mesh import parse_mesh
from jaxinfer.text_scores import value_text
from tests.toys import END, TINY_LLAMA, float32_backend, random_params

TOY = replace(TINY_LLAMA, num_layers=1)
PROMPTS = [[1, 70, 80, 90], [1, 5, 6, 7, 8, 9, 10], [3], [200, 100]]
# Ends are likely, so that trees have some.
SAMPLINGS = [
    SamplingParams(logit_bias={END: 5.0}),
    SamplingParams(temperature=0.9, seed=5, logit_bias={END: 4.0}),
    SamplingParams(temperature=1.3, top_p=0.5, seed=6, logit_bias={END: 4.0}),
    SamplingParams(temperature=1.2, top_k=20, seed=7),
]
ASKED = {"max_new_tokens": 5, "sampling": SAMPLINGS}


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return LanguageModel(TOY, random_params(TOY), float32_backend())


@pytest.fixture(scope="module")
def head():
    drawn = init_value_head(TOY.model_dim, 24, jax.random.key(1))
    return {**drawn, "out": {"kernel": jax.random.normal(jax.random.key(2), (1, 24)), "bias": np.float32([0.5])}}


@pytest.fixture
def folder(tmp_path, lm, head):
    write_value_head(tmp_path / "value", head, base="toy", base_fingerprint=lm.fingerprint)
    return tmp_path / "value"


def check(lm: LanguageModel, folder, **options) -> None:
    seen: list[Candidate] = []

    def by_texts(candidates: list[Candidate]) -> list[float]:
        seen.extend(candidates)
        texts = [[*one.prompt_tokens, *one.tokens] for one in candidates]
        return [value_text(lm, text[:-1] if text[-1] == END else text, folder)[-1] for text in texts]

    search = TreeSearch(simulations=6, actions=3, **options)
    found = lm.generate(PROMPTS, **ASKED, strategy=replace(search, value=str(folder)))
    expected = lm.generate(PROMPTS, **ASKED, strategy=search, value=by_texts)
    assert [one.tokens for one in found] == [one.tokens for one in expected]
    assert any(one.is_whole and one.tokens[-1] == END for one in seen)
    alone = lm.generate(
        PROMPTS[1:2], **{**ASKED, "sampling": SAMPLINGS[1]}, strategy=replace(search, value=str(folder))
    )
    assert alone[0].tokens == found[1].tokens
    plain = lm.generate(PROMPTS, **ASKED)
    assert [one.tokens for one in found] != [one.tokens for one in plain]


@pytest.mark.exhaustive
def test_without_a_continuation_a_head_reads_the_node_alone(lm, folder):
    check(lm, folder, depth=0)


@pytest.mark.exhaustive
def test_rows_search_alone_as_in_a_batch_and_find_other_texts_than_plain_decoding(lm, folder):
    asked = {**ASKED, "strategy": f"mcts:simulations=6,actions=3,depth=2,value={folder}"}
    many = lm.generate(PROMPTS * 4, max_new_tokens=5, sampling=SAMPLINGS * 4, strategy=asked["strategy"], batch_size=17)
    alone = [
        lm.generate([prompt], **{**asked, "sampling": sampling})[0].tokens
        for prompt, sampling in zip(PROMPTS, SAMPLINGS)
    ]
    assert [one.tokens for one in many] == alone * 4
    assert alone != [one.tokens for one in lm.generate(PROMPTS, **ASKED)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [{"depth": 3, "tokens": 2}, {"depth": 1, "policy": "puct"}])
def test_however_texts_are_chosen(lm, folder, options):
    check(lm, folder, **options)


@pytest.mark.exhaustive
@pytest.mark.parametrize("spec", ["tensor=2,data=2", "sequence=2", "pipeline=2"])
def test_on_every_mesh(folder, head, spec):
    mesh, config = parse_mesh(spec), TINY_LLAMA
    models = (None, mesh.build(jax.devices()[: mesh.num_devices]))
    one, split = (LanguageModel(config, random_params(config), float32_backend(), mesh=each) for each in models)
    write_value_head(folder, head, overwrite=True)
    asked = {**ASKED, "strategy": f"mcts:simulations=6,actions=3,depth=2,value={folder}"}
    assert [each.tokens for each in split.generate(PROMPTS, **asked)] == [
        each.tokens for each in one.generate(PROMPTS, **asked)
    ]


def test_a_head_comes_back_as_it_was_and_a_wrong_one_is_named(lm, folder, head, tmp_path):
    found = read_value_head(folder, TOY, lambda: lm.fingerprint)
    jax.tree.map(np.testing.assert_array_equal, found, dict(head))
    with pytest.raises(InvalidCheckpoint, match="is for the weights"):
        read_value_head(folder, TOY, lambda: "others")
    with pytest.raises(InvalidCheckpoint, match="the value head reads 32 channels, but hidden states have 48"):
        read_value_head(folder, replace(TOY, model_dim=48))
    damaged = tmp_path / "damaged"
    for name, content, told in (
        ("value_head.json", b"{", "value_head.json"),
        ("value_head.json", b'{"model_dim": 32, "inner": "many"}', "inner must be a whole number"),
        ("value_head.json", b'{"model_dim": 32, "inner": 25}', "tensor inner.kernel has shape"),
        ("value_head.json", b'{"model_dim": 32, "inner": 24, "more": 1}', "unknown field more"),
        ("value_head.safetensors", b"", "value_head.safetensors"),
    ):
        write_value_head(damaged, head, overwrite=True)
        (damaged / name).write_bytes(content)
        with pytest.raises(JaxinferError, match=told) as refused:
            read_value_head(damaged, TOY)
        assert len(str(refused.value).splitlines()) == 1
    broken = {**head, "out": {**head["out"], "bias": np.float32([np.nan])}}
    write_value_head(damaged, broken, overwrite=True)
    with pytest.raises(InvalidCheckpoint, match=r"out\.bias holds numbers that are not finite"):
        read_value_head(damaged, TOY)
