"""A value head learns at every token of an answer what a checker says of it whole.

Answers to one prompt are all trained on or all held out.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import Candidate
from jaxinfer.decoding.strategies.mcts import TreeSearch
from jaxinfer.model_loading import load
from jaxinfer.models.value_head import head_values, init_value_head
from jaxinfer.text_scores import value_text
from tests.toys import fable, float32_backend
from train.command import run_command
from train.data import __main__ as data
from train.features.hidden_states import HiddenStates
from train.loop.fit import read_metrics
from train.value_head import __main__ as value_head
from train.value_head.__main__ import in_units_of_scores, train_value_head
from train.value_head.loss import ValueEvaluation, ValueLoss
from train.value_head.states import Rollout, ValueBatch, ValueSource, read_rollouts, split_prompts

BACKEND = float32_backend(scan_layers=True)


def by_spring(candidates: list[Candidate]) -> list[float]:
    """Prefer sentences that end in spring."""
    return [float(one.text.splitlines()[0].endswith("in spring.") if one.text else False) for one in candidates]


def drawn_head(width: int):
    head = init_value_head(width, 5, jax.random.key(0))
    return {**head, "out": {"kernel": jax.random.normal(jax.random.key(1), (1, 5)), "bias": jnp.full(1, 0.25)}}


@pytest.mark.slow
def test_the_loss_is_the_squared_error_of_the_network_as_it_is_written_down():
    rng, head = np.random.default_rng(0), drawn_head(8)
    hidden_PD, scores_P = rng.standard_normal((6, 8)).astype(np.float32), rng.standard_normal(6).astype(np.float32)
    inner = hidden_PD @ head["inner"]["kernel"].T + head["inner"]["bias"]
    values_P = (inner / (1 + np.exp(-inner))) @ head["out"]["kernel"][0] + head["out"]["bias"]
    tally = ValueLoss(BACKEND)(head, {}, ValueBatch(jnp.asarray(hidden_PD), scores_P), jax.random.key(0))
    np.testing.assert_allclose(tally.loss, np.sum((values_P - scores_P) ** 2), rtol=1e-5)
    assert tally.num_tokens == 6
    found = head_values(in_units_of_scores(head, 7.0, 3.0), jnp.asarray(hidden_PD), BACKEND)
    np.testing.assert_allclose(found, 7 + 3 * values_P, rtol=1e-5)


def test_answers_of_a_prompt_stay_together_and_texts_are_each_alone():
    rollouts = [Rollout((prompt, 1, answer), 1, 0.0) for prompt in range(6) for answer in range(3)]
    rollouts += [Rollout((9, 9), 0, 1.0)] * 4
    trained, held_out = split_prompts(rollouts, 0.3, seed=2)
    assert sorted([*trained, *held_out]) == list(range(22))
    sides = [{rollouts[at].prompt for at in part} - {()} for part in (trained, held_out)]
    assert sides[0] | sides[1] == {(prompt,) for prompt in range(6)}
    assert not sides[0] & sides[1]


def test_the_evaluation_counts_pairs_of_a_prompt_and_what_is_explained():
    rollouts = [Rollout((1, 2, 3), 1, score) for score in (0.0, 1.0, 1.0)]
    # The head's value is the first channel where the others are zero: nearly, as SiLU of a large number is itself.
    head = {
        "inner": {"kernel": jnp.array([[100.0, 0.0]]), "bias": jnp.zeros(1)},
        "out": {"kernel": jnp.array([[0.01]]), "bias": jnp.zeros(1)},
    }
    # The last token of the second answer says that it is the worst.
    first_P = np.float32([0.5, 0.1, 0.2, 0.5, 0.8, 0.1, 0.5, 0.9, 0.9])
    states = HiddenStates(np.stack([first_P, 0 * first_P], 1), *[np.repeat(np.arange(3), 3)] * 3, np.ones(9, bool))
    source = ValueSource.of(states, np.arange(3), np.array([0.0, 1.0, 1.0]), 0.0, 1.0)
    figures = ValueEvaluation(BACKEND, source, rollouts)(head)
    assert figures["right_pairs"] == [0.5, 1.0, 0.5]
    scores_P = np.repeat([0.0, 1.0, 1.0], 3)
    np.testing.assert_allclose(
        figures["explained"], 1 - np.mean((first_P - scores_P) ** 2) / np.var(scores_P), atol=1e-3
    )


@pytest.mark.slow
def test_files_with_scores_are_read_and_mistakes_are_one_line(trained_model, trained_folder, tmp_path, capsys):
    path = tmp_path / "scored.jsonl"
    lines = [
        {"prompt_tokens": [1, 5], "tokens": [6, 7], "score": 0.5},
        {"prompt": "The", "response": " fox", "score": 1},
        {"text": "The fox", "score": 0},
    ]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    found = read_rollouts(path, trained_model)
    assert [(one.num_prompt, one.score) for one in found] == [(2, 0.5), (3, 1.0), (0, 0.0)]
    assert found[0].tokens == (1, 5, 6, 7)
    assert found[1].tokens == found[2].tokens
    for line, told in (
        ({"text": "x"}, "line 1: needs a 'score'"),
        ({"text": "x", "score": "good"}, "line 1: needs a 'score'"),
        ({"score": 1.0}, "line 1: needs 'prompt_tokens'"),
        ({"prompt_tokens": [1], "tokens": [999], "score": 1}, "line 1: holds token ids that the model does not have"),
        ({"prompt_tokens": [1], "tokens": [], "score": 1}, "line 1: 0 tokens after 1"),
    ):
        path.write_text(f"{json.dumps(line)}\n" * 2)
        assert train("--model", trained_folder, "--data", path, "--out", tmp_path / "run") == 2
        errors = capsys.readouterr().err
        assert told in errors
        assert errors.count("\n") == 1
    path.write_text(f"{json.dumps(lines[0])}\n{json.dumps(lines[2] | {'score': 0.5})}\n" * 2)
    assert train("--model", trained_folder, "--data", path, "--out", tmp_path / "run") == 2
    assert "all answers have the score 0.5" in capsys.readouterr().err


def train(*arguments):
    return run_command("value_head", "", value_head.add_arguments, value_head.run, list(map(str, arguments)))


def roll_out(*arguments):
    words = ["rollouts", *map(str, arguments)]
    return run_command("data", "", data.add_arguments, lambda options: options.run(options), words)


@pytest.mark.exhaustive
def test_from_prompts_and_a_checker_to_a_search_by_what_was_learned(trained_folder, tmp_path, capsys):
    prompts, rollouts = tmp_path / "prompts.jsonl", tmp_path / "rollouts.jsonl"
    starts = sorted({line[:12] for line in fable(80, seed=3).splitlines()})
    prompts.write_text("".join(json.dumps({"prompt": start}) + "\n" for start in starts))
    drawing = ("--model", trained_folder, "--prompts", prompts, "--raw", "--samples", 24, "--max-new-tokens", 48)
    scorer = ("--scorer", f"{__name__}:by_spring", "--out", rollouts)
    assert roll_out(*drawing, *scorer) == 0
    whole = rollouts.read_text()
    lines = whole.splitlines(keepends=True)
    assert len(lines) == 24 * len(starts)
    # An interrupted run goes on with the prompts that lack rollouts.
    rollouts.write_text("".join(lines[:-24]) + lines[-24][:20])
    assert roll_out(*drawing, *scorer) == 0
    assert sorted(rollouts.read_text().splitlines()) == sorted(whole.splitlines())
    assert roll_out(*drawing, "--scorer", "nowhere:x", "--out", rollouts) == 2
    options = ("--data", rollouts, "--inner", 32, "--epochs", 12, "--held-out", 0.2, "--eval-every", 100)
    base = ("--model", trained_folder, *options)
    assert train(*base, "--out", tmp_path / "run") == 0
    metrics = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert max(line["evaluation"]["explained"] for line in metrics if "evaluation" in line) > 0.1
    assert "mcts:value" in (tmp_path / "run" / "value" / "README.md").read_text()
    lm = load(trained_folder)
    folder = train_value_head(lm, read_rollouts(rollouts, lm), tmp_path / "library", inner=32, epochs=12, held_out=0.2)
    ids = lm.tokenizer.encode("The quick fox")
    assert value_text(lm, ids, folder) == value_text(lm, ids, tmp_path / "run" / "value")
    assert train(*base, "--out", tmp_path / "dry", "--dry-run") == 0
    asked = {"max_new_tokens": 48, "batch_size": len(starts)}
    search = TreeSearch(simulations=12, actions=4, depth=12, tokens=4, value=str(tmp_path / "run" / "value"))
    found = lm.generate(starts, strategy=search, **asked)
    assert all(0 < one.stats.steps < one.stats.new_tokens < one.stats.target_passes for one in found)
