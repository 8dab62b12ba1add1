"""The quality benchmark's figures are those of the models' own logits, and every token is scored once."""

import json
from contextlib import contextmanager

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxinfer
from jaxinfer.bench.quality.bit_widths import BitWidth, round_evenly
from jaxinfer.bench.quality.measure import QualityRun, Question, Work
from jaxinfer.bench.quality.table import quality_lines
from jaxinfer.bench.quality.windows import cut_windows
from jaxinfer.cli.main import main
from jaxinfer.errors import InvalidOption
from tests.toys import encode_bytes

TEXT = "The fox went to the river, and the crow, who was old, said nothing at all that day. "


@settings(derandomize=True, deadline=None)
@given(st.integers(2, 60), st.integers(2, 12), st.data())
def test_every_token_is_scored_once_with_as_much_before_it_as_there_is(num_tokens, context, data):
    stride = data.draw(st.integers(1, context))
    windows = cut_windows(num_tokens, context, stride)
    scored = [at for window in windows for at in range(window.first, window.end)]
    unscored = {0} if stride < context else set(range(0, num_tokens, context))
    assert scored == [at for at in range(num_tokens) if at not in unscored]
    for window in windows:
        assert window.end - window.begin <= context
        assert window.begin == 0 or window.first - window.begin >= min(context - stride, 1)


def test_a_text_without_a_token_to_score_is_refused():
    with pytest.raises(InvalidOption, match="a text of 1 tokens has none to score"):
        cut_windows(1, 8, 8)


@pytest.mark.slow
def test_figures_are_those_of_the_logits(tiny_llama_folder):
    lm, done = jaxinfer.load(tiny_llama_folder()), []
    # Another model, so that the divergence one way is not nearly that of the other way.
    rounded = jaxinfer.load(tiny_llama_folder(1), weights="int8")
    tokens = encode_bytes(TEXT)
    asked = encode_bytes("The fox")
    (right,) = lm.generate([asked], max_new_tokens=6, sampling=jaxinfer.SamplingParams(temperature=0))
    questions = (Question(asked, (right.text.strip(),)), Question(asked, ("no such answer",)))
    work = Work(tokens, 32, 20, questions, 6)

    watched = []

    @contextmanager
    def watch(name, total):
        before = len(done)
        watched.append(name)
        yield done.append
        assert done[before:] == [watched.pop()] * total

    def load_in(form):
        # It has a progress bar of its own, and a terminal shows one at a time.
        assert (form, watched) == ("int8", [])
        return rounded

    running = QualityRun(lm, ["int8"], load_in, work)
    running.measure(watch)
    report = running.report("toy")
    assert report.complete
    assert len(done) == 2 * (len(work.windows) + len(questions) + 1)
    assert (report.scored_tokens, report.questions) == (len(tokens) - 1, 2)
    first, second = report.results
    assert (first.weights, first.divergence, first.agreement, first.exact_matches) == ("as they are", None, None, 0.5)
    assert second.num_bytes < 0.5 * first.num_bytes

    def logprobs(model, begin, end):
        logits_TV = np.asarray(model.logits([tokens[begin:end]])[0, :-1], np.float64)
        return logits_TV - np.log(np.exp(logits_TV).sum(axis=-1, keepdims=True))

    losses, other_losses, divergences, same = [], [], [], []
    for begin, start, end in cut_windows(len(tokens), 32, 20):
        known, found = (logprobs(model, begin, end)[start - begin - 1 :] for model in (lm, rounded))
        targets = np.array(tokens[start:end])[:, None]
        losses += np.take_along_axis(known, targets, axis=1).tolist()
        other_losses += np.take_along_axis(found, targets, axis=1).tolist()
        divergences += (np.exp(known) * (known - found)).sum(axis=1).tolist()
        same += (known.argmax(axis=1) == found.argmax(axis=1)).tolist()
    assert first.perplexity == pytest.approx(np.exp(-np.mean(losses)), rel=1e-4)
    assert second.perplexity == pytest.approx(np.exp(-np.mean(other_losses)), rel=1e-4)
    assert second.divergence == pytest.approx(np.mean(divergences), rel=1e-3)
    assert second.divergence > 0
    assert second.agreement == pytest.approx(np.mean(same))
    assert first.perplexity != second.perplexity
    title, _, titles, *rows = quality_lines(report)
    assert f"{len(tokens) - 1} tokens in windows of 32, stride 20, 2 questions" in title
    assert titles.split()[:4] == ["weights", "MB", "perplexity", "change"]
    assert [row.split("  ")[0] for row in rows] == ["as they are", "int8"]
    assert f"{second.perplexity / first.perplexity - 1:+.2%}" in rows[1]


def test_weights_are_the_nearest_of_evenly_spaced_levels_of_their_group():
    weights = np.random.default_rng(0).normal(size=(3, 128)).astype(np.float32)
    for bits in (2, 3, 8):
        found = np.asarray(round_evenly(weights, bits, 64)).reshape(-1, 64)
        for group, rounded in zip(weights.reshape(-1, 64), found, strict=True):
            step = (group.max() - group.min()) / (2**bits - 1)
            # Scale and minimum are float16.
            assert np.abs(group - rounded).max() <= step / 2 + 4e-3
            assert len(np.unique(rounded)) <= 2**bits


def test_a_model_in_any_number_of_bits_takes_their_bytes_and_stands_for_what_they_do(tiny_llama_folder):
    lm = jaxinfer.load(tiny_llama_folder(1))
    kernels = sum(leaf.size for leaf in jax.tree.leaves(lm.params["blocks"]) if leaf.ndim > 1)
    others = sum(leaf.nbytes for leaf in jax.tree.leaves(lm.params)) - 4 * kernels
    width = BitWidth(3, 32)
    assert width.num_bytes(lm.params) == others + kernels * 4 / 8
    expected = lm.logits([encode_bytes(TEXT)])
    errors = [np.abs(BitWidth(bits, 32).round(lm).logits([encode_bytes(TEXT)]) - expected).max() for bits in (2, 5, 8)]
    assert errors[0] > 4 * errors[1] > 16 * errors[2] > 0
    assert lm.params["embed"]["embedding"] is width.round(lm).params["embed"]["embedding"]


def test_an_interrupt_shows_what_is_done(tiny_llama_folder, tmp_path, capsys, monkeypatch):
    def interrupted(self, lm):
        raise KeyboardInterrupt

    monkeypatch.setattr(BitWidth, "round", interrupted)
    (tmp_path / "text.txt").write_text(TEXT)
    given = ["bench", "quality", "--model", str(tiny_llama_folder(1)), "--text", str(tmp_path / "text.txt")]
    assert main([*given, "--tokens", "40", "--context", "32", "--bits", "4", "--groups", "32"]) == 130
    shown = capsys.readouterr().out
    assert "stopped early" in shown
    assert "as they are" in shown


@pytest.mark.exhaustive
def test_the_command_prints_json_and_draws_a_chart(tiny_llama_folder, tmp_path, capsys):
    (tmp_path / "text.txt").write_text(TEXT)
    given = ["bench", "quality", "--model", str(tiny_llama_folder()), "--text", str(tmp_path / "text.txt"), "--json"]
    given += ["--tokens", "40", "--context", "32", "--weights", "int8", "--caches", "int8", "--bits", "8", "2"]
    given += ["--groups", "32", "--activations", "int8"]
    given += ["--chart", str(tmp_path / "chart.svg")]
    assert main(given) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["scored_tokens"], report["questions"]) == (38, 0)
    widths = ["8 bits:group=32", "2 bits:group=32"]
    found = [each["weights"] for each in report["results"]]
    assert found == ["as they are", "int8", "int8, activations in int8", "cache in int8", *widths]
    assert [each["decode_tokens_per_second"] for each in report["results"][-2:]] == [None, None]
    _, one, other, *_ = report["results"]
    assert 0 < one["divergence"] < other["divergence"]
    assert one["num_bytes"] == other["num_bytes"]
    assert (tmp_path / "chart.svg").read_text().count("int8") >= 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "nothing to measure: give --text FILE, --task FILE or both"),
        (["--task", "TASK", "--chart", "x.svg"], "--chart draws perplexities"),
        (["--text", "TEXT", "--context", "8", "--stride", "9"], "--stride 9 exceeds --context 8"),
        (["--text", "TEXT", "--weights", "int3"], "unknown weights 'int3'"),
        (["--text", "TEXT", "--weights", "int8", "int8"], "name each form once"),
        (["--text", "TEXT", "--weights", "nf4", "--activations", "int8"], "no products with weights 'nf4'"),
        (["--text", "TEXT", "--weights", "int8", "--activations", "fp8"], "unknown activations 'fp8'; use int8"),
        (["--text", "TEXT", "--caches", "int4"], "unknown cache_dtype 'int4'"),
        (["--text", "TEXT", "--caches", "fp8", "fp8"], "name each dtype once"),
        (["--text", "TEXT", "--bits", "9"], "invalid choice: 9"),
        (["--text", "TEXT", "--bits", "4", "4"], "name each number once"),
        (["--text", "TEXT", "--groups", "32"], "give --bits too"),
        (
            ["--text", "TEXT", "--bits", "4", "--model", "TOY"],
            "rows of 32 weights do not divide into groups of 64; use --groups 32",
        ),
        (["--text", "TEXT", "--weights", "int8", "int4", "--model", "TOY"], "rows of 32 weights do not divide"),
        (["--text", "TEXT", "--weights", "int8", "gguf", "--model", "TOY"], "is no GGUF file"),
        (["--text", "TEXT", "--context", "5000", "--model", "TOY"], "the model reads 1024 tokens at most"),
        (["--text", "EMPTY"], "the file is empty"),
        (["--text", "TEXT", "--weights", "nf4", "--method", "gptq"], "a method needs int8 or int4:group=64"),
        (["--text", "TEXT", "--method", "awq"], "--method awq chooses weights: give --weights"),
        (["--text", "TEXT", "--mesh", "x=2"], "x=2"),
        (["--text", "TEXT", "--calibration", "TEXT"], "--calibration is for --method gptq"),
        (["--text", "TEXT", "--method", "gptq", "--calibration", "EMPTY"], "--calibration"),
        (["--text", "BINARY"], "not UTF-8 text"),
        (["--text", "MISSING"], "MISSING"),
        (["--task", "TEXT"], "line 1: not JSON"),
        (["--task", "NONE"], "line 1: needs a 'prompt' and 'references'"),
        (["--task", "BLANK"], "line 1: 'references' are no texts"),
        (["--task", "LINES"], "line 2: not JSON"),
    ],
)
def test_mistakes_are_told_in_one_line(given, message, tmp_path, capsys, tiny_llama_folder):
    files = {
        "TEXT": b"some text", "EMPTY": b" \n", "BINARY": b"\xff\xfe\x00", "TASK": b'{"prompt": "a", "references": "b"}',
        "NONE": b'{"prompt": "a"}', "BLANK": b'{"prompt": "a", "references": [" "]}',
        "LINES": '{"prompt": "a\u2028b\x85c", "references": "b"}\r\nno'.encode(),
    }  # fmt: skip
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    given = [str(tiny_llama_folder(1) if one == "TOY" else tmp_path / one) if one.isupper() else one for one in given]
    assert main(["bench", "quality", *given]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
