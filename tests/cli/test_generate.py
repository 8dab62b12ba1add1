"""``jaxinfer generate`` prints what the library generates, in order, and nothing else on standard output."""

import errno
import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import jaxinfer
from jaxinfer.cli import loading
from jaxinfer.results import StreamPiece
from tests.cli.conftest import Outcome

Run = Callable[..., Outcome]
PROMPTS = ["The quick", "One grey fox", "A small otter"]
SHORT = ("--max-new-tokens", "12")


@pytest.fixture
def model(trained_model: jaxinfer.LanguageModel) -> jaxinfer.LanguageModel:
    """Return the trained toy; commands of this module are given it in place of loading it again."""
    return trained_model


@pytest.fixture
def generate(run: Run, model: jaxinfer.LanguageModel, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(loading, "load_model", lambda options: model)
    return lambda *arguments, **options: run("generate", *arguments, **options)


@pytest.mark.slow
def test_the_model_of_the_options_is_loaded_and_streamed(run: Run, trained_folder: Path, model: Any) -> None:
    outcome = run("generate", PROMPTS[0], "--model", trained_folder, *SHORT, "--max-len", "256", "--dtype", "float32")
    assert outcome == Outcome(0, model.generate(PROMPTS[0], max_new_tokens=12)[0].text + "\n", "")


def test_json_is_one_object_with_the_fields_of_the_contract(generate: Run, model: Any) -> None:
    outcome = generate(PROMPTS[0], "--json", *SHORT)
    (line,) = outcome.out.splitlines()
    found = json.loads(line)
    expected = model.generate(PROMPTS[0], max_new_tokens=12)[0]
    assert outcome.code == 0
    assert set(found) == {"prompt", "text", "tokens", "finish_reason", "stats"}
    assert (found["prompt"], found["text"], tuple(found["tokens"])) == (PROMPTS[0], expected.text, expected.tokens)
    assert found["finish_reason"] == expected.finish_reason
    assert set(found["stats"]) == set(vars(expected.stats))


@pytest.mark.parametrize("size", ["2", pytest.param("16", marks=pytest.mark.slow)])
def test_prompts_of_a_file_come_back_in_order_whatever_the_batch(
    generate: Run, model: Any, tmp_path: Path, size: str
) -> None:
    path = tmp_path / "prompts.jsonl"
    entries = [{"prompt": PROMPTS[0]}, {"turns": [PROMPTS[1], "and then"]}, {"prompt": PROMPTS[2], "id": 3}]
    path.write_text("\n\n".join(json.dumps(entry) for entry in entries))
    expected = [model.generate(prompt, max_new_tokens=12)[0].text for prompt in PROMPTS[:3]]
    lines = generate("--prompts", path, "--json", "--batch-size", size, *SHORT).out.splitlines()
    assert [json.loads(line)["prompt"] for line in lines] == PROMPTS[:3]
    assert [json.loads(line)["text"] for line in lines] == expected


@pytest.mark.parametrize("arguments", [["-"], ["--prompts", "-"]])
@pytest.mark.parametrize("is_json", [True, False])
def test_standard_input_holds_a_prompt_a_line(generate: Run, model: Any, arguments: list[str], is_json: bool) -> None:
    lines = [json.dumps({"prompt": prompt}) if is_json else prompt for prompt in PROMPTS[:2]]
    outcome = generate(*arguments, "--json", *SHORT, stdin="\r\n".join(lines).encode())
    assert [json.loads(line)["prompt"] for line in outcome.out.splitlines()] == PROMPTS[:2]


def test_several_results_are_headed_by_their_prompts(generate: Run, model: Any) -> None:
    outcome = generate("-", *SHORT, stdin="\n".join(PROMPTS[:2]).encode())
    texts = [model.generate(prompt, max_new_tokens=12)[0].text for prompt in PROMPTS[:2]]
    assert outcome.out == "".join(
        f"[{number}] {prompt}\n{text}\n\n" for number, (prompt, text) in enumerate(zip(PROMPTS, texts), 1)
    )


def test_chat_applies_the_template(generate: Run, model: Any) -> None:
    reply = model.chat([{"role": "user", "content": PROMPTS[0]}], max_new_tokens=12)
    assert generate(PROMPTS[0], "--chat", *SHORT).out == reply.text + "\n"


def test_every_sampling_option_reaches_the_draw(generate: Run, model: Any) -> None:
    given: dict[str, Any] = {
        "temperature": 1.5,
        "top_k": 40,
        "top_p": 0.95,
        "min_p": 0.01,
        "seed": 7,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.1,
        "min_new_tokens": 3,
    }
    options = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    options += ["--stop", "qqq", "--stop", "zzz", "--logit-bias", "50=-2.5", "--ignore-eos", "--num-samples", "2"]
    outcome = generate(PROMPTS[0], "--json", "--logprobs", *options, *SHORT)
    params = jaxinfer.SamplingParams(
        **given, stop=("qqq", "zzz"), logit_bias={50: -2.5}, ignore_eos=True, n=2, logprobs=True
    )
    expected = model.generate(PROMPTS[0], max_new_tokens=12, sampling=params)
    found = [json.loads(line) for line in outcome.out.splitlines()]
    assert [tuple(one["tokens"]) for one in found] == [one.tokens for one in expected]
    assert [one["logprobs"] for one in found] == [pytest.approx(one.logprobs) for one in expected]
    assert found[0]["tokens"] != found[1]["tokens"]


def test_every_stop_string_of_the_command_ends_the_text(generate: Run, model: Any) -> None:
    whole = model.generate(PROMPTS[0], max_new_tokens=12)[0].text
    outcome = generate(PROMPTS[0], "--stop", "qqq", "--stop", whole[4:7], *SHORT)
    assert outcome.out == whole[: whole.index(whole[4:7])] + "\n"


def test_stats_go_to_standard_error(generate: Run) -> None:
    single = generate(PROMPTS[0], "--stats", *SHORT)
    assert "tokens/s" in single.err
    assert "tokens/s" not in single.out
    several = generate("-", "--stats", "--json", *SHORT, stdin="\n".join(PROMPTS[:2]).encode())
    assert [line.split()[0] for line in several.err.splitlines() if line.startswith("[")] == ["[1]", "[2]"]


def interrupt_after(text: str) -> Callable[..., Iterator[StreamPiece]]:
    def stream(*arguments: object, **options: object) -> Iterator[StreamPiece]:
        yield StreamPiece(text, (1,))
        raise KeyboardInterrupt

    return stream


def test_an_interrupt_keeps_the_text_and_exits_130(generate: Run, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "stream", interrupt_after("so far"))
    assert generate(PROMPTS[0]) == Outcome(130, "so far", "\n")


class FullDisk(io.StringIO):
    """A standard output that takes nothing."""

    def __init__(self, reason: int) -> None:
        super().__init__()
        self.reason = reason

    def write(self, text: str) -> int:
        raise OSError(self.reason, "no")

    def flush(self) -> None:
        raise OSError(self.reason, "no")


@pytest.mark.parametrize(
    ("reason", "code", "has_error"), [(errno.ENOSPC, 2, True), (errno.EPIPE, 141, False)], ids=["full", "closed"]
)
def test_output_that_cannot_be_written_ends_quietly(
    generate: Run, monkeypatch: pytest.MonkeyPatch, reason: int, code: int, has_error: bool
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", FullDisk(reason))
        outcome = generate(PROMPTS[0], *SHORT)
    assert outcome.code == code
    assert len(outcome.err.splitlines()) == len(outcome.error_lines) == int(has_error)
