"""A tiny model is trained to find facts: only answers are predicted, and each stands in its text."""

import json

import pytest
from tokenizers import Tokenizer

from jaxinfer.bench.needle.haystack import vocabulary
from jaxinfer.cli.main import main
from train.model.words import words_tokenizer
from train.needle.__main__ import add_arguments, run
from train.needle.texts import STAGES, Stage, needle_batch, stage_at


def test_answers_are_what_is_predicted_and_can_be_looked_up():
    words = Tokenizer.from_str(words_tokenizer(vocabulary()))
    assert words.encode(" ".join(vocabulary())).ids == list(range(2, 2 + len(vocabulary())))
    batch = needle_batch(Stage(1, 3, 60, 4, 5), lambda text: words.encode(text).ids, seed=0, step=7)
    again = needle_batch(Stage(1, 3, 60, 4, 5), lambda text: words.encode(text).ids, seed=0, step=7)
    assert (batch.tokens_BT == again.tokens_BT).all()
    assert batch.tokens_BT.shape == (1, 3, 60)
    for tokens_T, mask_T in zip(batch.tokens_BT[0], batch.mask_BT[0]):
        said = [words.id_to_token(token) for token in tokens_T]
        assert mask_T.sum() == 5
        for at in mask_T.nonzero()[0]:
            # The question, "Oslo=", and its answer, "red.", are the fact "Oslo=red.".
            assert said[at - 1] + said[at] in said[:50]


def test_stages_follow_each_other():
    assert [stage_at(step, STAGES).length for step in (0, 299, 300, 449, 450, 9999)] == [48, 48, 256, 256, 512, 2048]


@pytest.mark.exhaustive
def test_the_trained_model_tells_caches_apart(tmp_path, capsys):
    import argparse

    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert run(parser.parse_args(["--out", str(tmp_path)])) == 0
    arguments = ["bench", "needle", "--model", str(tmp_path / "model"), "--budgets", "64", "--lengths", "512", "--json"]
    assert main(arguments) == 0
    full, retrieval, streaming = json.loads(capsys.readouterr().out)["points"]
    assert full["found"] >= 18
    assert retrieval["found"] >= 12 > 8 >= streaming["found"]
