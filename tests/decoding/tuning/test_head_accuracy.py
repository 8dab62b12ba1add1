"""Accuracies of heads, against the definition of heads written out in NumPy."""

import numpy as np
import pytest

import jaxinfer
from jaxinfer.decoding.trees.static import build_tree
from jaxinfer.decoding.tuning.head_accuracy import measure_accuracies
from jaxinfer.errors import InvalidOption
from tests.decoding.fitted_heads import fit_conditioned, fit_plain, head_scores, hidden_states
from tests.toys import encode_bytes, fable

RANKS = 3


@pytest.mark.parametrize("fit", [fit_plain, pytest.param(fit_conditioned, marks=pytest.mark.slow)])
def test_accuracies_are_how_often_each_rank_is_right(trained_folder, fit):
    lm = jaxinfer.load(trained_folder)
    texts = [encode_bytes(fable(4, 0)[:90]), encode_bytes(fable(4, 1)[:40])]
    head_params = fit(lm, encode_bytes(fable(4, 0)[:90]), 2)
    ids, table_VD = np.asarray(head_params.get("ids", np.arange(lm.config.vocab_size))), lm.params["embed"]["embedding"]
    for index, found in enumerate(measure_accuracies(lm.programs.decoder, lm.params, head_params, texts, RANKS)):
        hits, tries = np.zeros(RANKS), 0
        for text in texts:
            hidden_TD = hidden_states(lm, text)
            for at in range(len(text) - 2 - index):
                along = np.asarray(table_VD)[text[at + 1 : at + 2 + index]]
                ranking = np.argsort(-head_scores(head_params["heads"][index], hidden_TD[at], along), kind="stable")
                hits += ids[ranking[:RANKS]] == text[at + 2 + index]
                tries += 1
        np.testing.assert_allclose(found, hits / tries, atol=1.5 / tries)
        assert 0.2 < found[0] < 1
    tree = build_tree(measure_accuracies(lm.programs.decoder, lm.params, head_params, texts, RANKS), {1: 1.0, 8: 1.2})
    assert tree[0] == (0,)


def test_texts_that_no_head_reaches_into_are_refused(trained_folder):
    lm = jaxinfer.load(trained_folder)
    head_params = fit_plain(lm, encode_bytes(fable(4, 0)[:60]), 2)
    with pytest.raises(InvalidOption, match="2 heads are measured on texts of 4 tokens"):
        measure_accuracies(lm.programs.decoder, lm.params, head_params, [[5, 6, 7]])
