"""A student learns what its teacher says, from whichever texts; the command as a user runs it, on a tiny model."""

import json
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxinfer
from jaxinfer import LanguageModel, SamplingParams
from jaxinfer.models.decoder import Decoder, abstract_params, output_logits
from jaxinfer.ops.backend import choose_backend
from tests.toys import BEGIN, TRAINED_LLAMA, encode_bytes, fable
from tests.train.loop.test_step import same_tree
from train.command import run_command
from train.distill import __main__ as distill
from train.distill.divergences import DIVERGENCES, forward_kl, jensen_shannon
from train.distill.evaluation import DraftEvaluation
from train.distill.loss import DistillBatch, DistillLoss
from train.distill.samples import DistillSource, SampleSettings, StudentSamples
from train.distill.student import choose_layers, open_student, prune_layers
from train.loop.fit import read_metrics
from train.loop.step import Schedule, TrainState, compile_step
from train.loop.whole_text import text_hidden
from train.model.export import save_hf_folder
from train.texts.packing import Example, Order, pack
from train.texts.rows import batches_of, pack_texts

LENGTH, STEPS = 64, 100
BACKEND = choose_backend("float32", "cpu", scan_layers=True)
STUDENT = Decoder(replace(TRAINED_LLAMA, num_layers=1), BACKEND)


@pytest.fixture(scope="module")
def teacher(trained_folder):
    return jaxinfer.load(trained_folder, scan_layers=True)


def sentences(count, seed):
    """Answers that go on from the first words of sentences."""
    texts = [(BEGIN, *encode_bytes(line + "\n")) for line in fable(count, seed).splitlines()]
    return [Example(text, (False,) * 10 + (True,) * (len(text) - 10)) for text in texts]


@pytest.fixture(scope="module")
def rows():
    return pack_texts(sentences(80, seed=3), LENGTH, 0.2, seed=0)


def train_student(teacher, source, divergence, num_steps=STEPS, hard=0.0):
    student = prune_layers(teacher, (0,))
    optimizer = Schedule(num_steps, peak_rate=5e-3).build_optimizer()
    loss = DistillLoss(teacher.programs.decoder, STUDENT, divergence, hard=hard)
    step = compile_step(loss, optimizer)
    state = TrainState(jnp.int32(0), student.params, optimizer.init(student.params))
    for at in range(num_steps):
        batch = source.batch_at(at, state.params)
        state, _ = step(state, teacher.params, jax.tree.map(lambda leaf: leaf[None], batch))
    return state.params


def fixed_source(rows, **changes):
    return DistillSource(rows.trained, Order(len(rows.trained.tokens_BT), 8, 0), seed=0, **changes)


def samples_of(writer, prompts, folder, every=10, count=16, seed=0):
    settings = SampleSettings(folder, every, count, 32, 1.0, LENGTH, seed)
    return StudentSamples(writer, prompts, settings)


@pytest.fixture(scope="module")
def writer(teacher):
    """The student as the library decodes it."""
    return LanguageModel(STUDENT.config, prune_layers(teacher, (0,)).params, BACKEND, tokenizer=teacher.tokenizer)


def evaluation_on(teacher, rows):
    return DraftEvaluation(teacher.programs.decoder, STUDENT, teacher.params, rows)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name == "reverse_kl" else pytest.mark.exhaustive)
        for name in DIVERGENCES
    ],
)
def test_a_distilled_student_is_accepted_more_often_than_the_undistilled_one(teacher, rows, name):
    evaluation = evaluation_on(teacher, rows.held_out)
    before = evaluation.measure(prune_layers(teacher, (0,)).params)
    after = evaluation.measure(train_student(teacher, fixed_source(rows), DIVERGENCES[name]))
    assert after.acceptance > before.acceptance + 0.1
    assert after.agreement > before.agreement + 0.1
    assert after.divergence < 0.5 * before.divergence


@pytest.mark.exhaustive
def test_on_the_students_own_texts_on_policy_training_does_at_least_as_well_as_fixed_data(
    teacher, rows, writer, tmp_path
):
    """Half of the rows are the student's own; judged on 48 texts that it writes in the end, after other prompts."""
    samples = samples_of(writer, rows.prompts, tmp_path / "samples")
    fixed = train_student(teacher, fixed_source(rows), forward_kl)
    source = fixed_source(rows, on_policy=0.5, samples=samples)
    on_policy = train_student(teacher, source, forward_kl)
    prompts = [example.tokens[:10] for example in sentences(48, seed=200)]
    own = samples_of(writer, prompts, tmp_path / "judged", count=48, seed=999).rows_at(0, on_policy)
    evaluation = evaluation_on(teacher, own)
    of_fixed, of_on_policy = evaluation.measure(fixed), evaluation.measure(on_policy)
    assert of_on_policy.acceptance > of_fixed.acceptance
    assert of_on_policy.divergence < 0.75 * of_fixed.divergence


@pytest.mark.exhaustive
def test_each_row_is_the_students_own_with_the_asked_probability(rows, writer, tmp_path):
    """The share over 800 rows misses by 0.09 with probability 1e-5 at the most (Hoeffding); 0 and 1 are exact."""
    samples = samples_of(writer, rows.prompts, tmp_path / "samples", every=1000)
    own = samples.rows_at(0, writer.params)
    texts = {tuple(row) for row in np.asarray(own.tokens_BT).tolist()}
    for share, slack in ((0.0, 0.0), (0.25, 0.09), (1.0, 0.0)):
        source = fixed_source(rows, on_policy=share, samples=samples)
        batches = [source.batch_at(step, writer.params) for step in range(100)]
        assert abs(np.mean([batch.is_sampled_B for batch in batches]) - share) <= slack
        for batch in batches[:10]:
            is_own = [tuple(row) in texts for row in np.asarray(batch.texts.tokens_BT).tolist()]
            assert is_own == batch.is_sampled_B.tolist()
    assert not fixed_source(rows).batch_at(0, {}).is_sampled_B.any()


@pytest.mark.slow
def test_samples_are_what_the_student_writes_and_a_round_is_kept(teacher, rows, writer, tmp_path):
    params = prune_layers(teacher, (1,)).params
    samples = samples_of(writer, rows.prompts, tmp_path / "samples", every=10, seed=5)
    first = samples.rows_at(3, params)
    lines = [json.loads(line) for line in (tmp_path / "samples" / "round_00000.jsonl").read_text().splitlines()]
    prompts = [line["prompt_tokens"] for line in lines]
    sampling = [SamplingParams(temperature=1.0, seed=5 + at) for at in range(16)]
    writer.params = params
    again = writer.generate(prompts, max_new_tokens=32, sampling=sampling)
    assert [tuple(line["tokens"]) for line in lines] == [result.tokens for result in again]
    assert int(np.sum(first.mask_BT)) == sum(len(line["tokens"]) for line in lines)
    other = samples_of(writer, rows.prompts, tmp_path / "samples", every=10, seed=5)
    same_tree(other.rows_at(9, writer.params), first)  # from the file, whatever the parameters are by then
    other.rows_at(10, params)
    assert (tmp_path / "samples" / "round_00001.jsonl").is_file()


def text_logits(decoder, params, tokens_BT, segments_BT):
    return output_logits(decoder, params, text_hidden(decoder, params, tokens_BT, segments_BT))


def log_softmax(logits):
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.sum(np.exp(shifted), axis=-1, keepdims=True))


def by_hand(teacher, params, batch):
    """Logits of both models in float64, and which positions count."""
    tokens_BT, segments_BT = jnp.asarray(batch.tokens_BT), jnp.asarray(batch.segments_BT)
    found = []
    for decoder, own in ((teacher.programs.decoder, teacher.params), (STUDENT, params)):
        forward = jax.jit(lambda own, decoder=decoder: text_logits(decoder, own, tokens_BT, segments_BT))
        found.append(np.asarray(forward(own), np.float64)[:, :-1])
    segments_BT, mask_BT = np.asarray(batch.segments_BT), np.asarray(batch.mask_BT)
    return *found, mask_BT[:, 1:] & (segments_BT[:, 1:] == segments_BT[:, :-1])


def test_the_loss_is_the_formula_and_the_student_alone_learns(teacher):
    """Two rows, of which the student wrote the second: that one has no target of its own."""
    batch, temperature = pack(sentences(2, seed=9), 48, seed=0), 0.5
    params = prune_layers(teacher, (1,)).params
    teachers, students, counts_BT = by_hand(teacher, params, batch)
    log_p, log_q, raw_q = (
        log_softmax(teachers / temperature),
        log_softmax(students / temperature),
        log_softmax(students),
    )
    kl = np.sum(np.sum(np.exp(log_p) * (log_p - log_q), axis=-1) * counts_BT)
    own_BT = np.take_along_axis(raw_q, np.asarray(batch.tokens_BT)[:, 1:, None], axis=-1)[..., 0]
    hard = -np.sum((own_BT * counts_BT)[0])
    loss = DistillLoss(teacher.programs.decoder, STUDENT, forward_kl, temperature, hard=0.3)

    def total(params, frozen):
        tally = loss(params, frozen, DistillBatch(batch, np.array([False, True])), jax.random.key(0))
        return tally.loss, tally

    differentiate = jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))
    (_, tally), (of_student, of_teacher) = differentiate(params, teacher.params)
    assert all(not np.asarray(leaf).any() for leaf in jax.tree.leaves(of_teacher))
    assert all(np.asarray(leaf).any() for leaf in jax.tree.leaves(of_student))
    np.testing.assert_allclose(tally.loss, kl + 0.3 * hard, rtol=1e-4)
    assert int(tally.num_tokens) == counts_BT.sum()
    accepted = np.sum(np.sum(np.minimum(np.exp(log_p), np.exp(log_q)), axis=-1) * counts_BT)
    np.testing.assert_allclose(tally.others["acceptance"][0], accepted, rtol=1e-4)
    figures = DraftEvaluation(teacher.programs.decoder, STUDENT, teacher.params, batch, temperature).measure(params)
    np.testing.assert_allclose(figures.acceptance, accepted / counts_BT.sum(), rtol=1e-4)
    np.testing.assert_allclose(figures.divergence, kl / counts_BT.sum(), rtol=1e-4)
    agreed = np.sum((log_p.argmax(axis=-1) == log_q.argmax(axis=-1)) & counts_BT)
    np.testing.assert_allclose(figures.agreement, agreed / counts_BT.sum(), rtol=1e-6)


@pytest.mark.exhaustive
def test_no_gradient_of_another_divergence_reaches_the_teacher(teacher):
    batch = DistillBatch(pack(sentences(2, seed=9), 48, seed=0), np.zeros(2, bool))
    loss = DistillLoss(teacher.programs.decoder, STUDENT, jensen_shannon, hard=0.5)

    def total(params, frozen):
        return loss(params, frozen, batch, jax.random.key(0)).loss

    params = prune_layers(teacher, (1,)).params
    of_student, of_teacher = jax.jit(jax.grad(total, argnums=(0, 1)))(params, teacher.params)
    assert all(not np.asarray(leaf).any() for leaf in jax.tree.leaves(of_teacher))
    assert all(np.asarray(leaf).any() for leaf in jax.tree.leaves(of_student))


def test_a_pruned_student_has_its_teachers_layers_bit_for_bit(tiny_llama_folder):
    teacher = jaxinfer.load(tiny_llama_folder(num_layers=3), scan_layers=True)
    for layers in ((0, 2), (1,)):
        student = prune_layers(teacher, layers)
        assert student.config == replace(teacher.config, num_layers=len(layers))
        blocks = student.params["blocks"] if len(layers) > 1 else student.params["blocks"]["layer_0"]
        places = np.array(layers) if len(layers) > 1 else layers[0]
        same_tree(blocks, jax.tree.map(lambda leaf, places=places: leaf[places], teacher.params["blocks"]))
        rest = {name: leaf for name, leaf in teacher.params.items() if name != "blocks"}
        same_tree({name: leaf for name, leaf in student.params.items() if name != "blocks"}, rest)
        assert jax.tree.structure(student.params) == jax.tree.structure(abstract_params(student.config, BACKEND))
    assert [choose_layers(text, 9) for text in ("3", "1", "9", "0,5")] == [(0, 4, 8), (0,), tuple(range(9)), (0, 5)]


def test_rows_that_fill_up_a_batch_count_nothing(rows):
    count = len(rows.held_out.tokens_BT)
    for size in (1, 3, count + 2):
        batches = list(batches_of(rows.held_out, size))
        assert len({np.shape(batch.tokens_BT) for batch in batches}) == 1
        assert sum(int(np.sum(batch.mask_BT)) for batch in batches) == int(np.sum(rows.held_out.mask_BT))


def distil(*arguments):
    return run_command("distill", "", distill.add_arguments, distill.run, list(map(str, arguments)))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "answers.jsonl"
    lines = [{"prompt_tokens": list(one.tokens[:10]), "tokens": list(one.tokens[10:])} for one in sentences(60, 7)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


OPTIONS = ("--length", LENGTH, "--batch-size", 4, "--eval-every", 20, "--learning-rate", 5e-3, "--held-out", 0.2)
SAMPLED = ("--on-policy", 0.5, "--resample-every", 8, "--samples", 16, "--max-new-tokens", 32)


@pytest.fixture(scope="module")
def run(trained_folder, data, tmp_path_factory):
    out = tmp_path_factory.mktemp("distilled") / "run"
    arguments = ("--model", trained_folder, "--student-layers", 1, "--data", data, *OPTIONS, *SAMPLED)
    assert distil(*arguments, "--epochs", 1, "--save-every", 10, "--out", out) == 0
    return out


def tokens_per_step(teacher, run):
    prompts = [line[:9] for line in fable(4, seed=77).splitlines()]
    strategy = f"draft_model:model={run / 'draft'},num_draft_tokens=4"
    drafted = teacher.generate(prompts, max_new_tokens=24, strategy=strategy)
    return sum(one.stats.new_tokens - 1 for one in drafted) / sum(one.stats.steps for one in drafted)


@pytest.mark.exhaustive
def test_a_draft_that_was_distilled_longer_drafts_well(teacher, trained_folder, data, tmp_path):
    arguments = ("--model", trained_folder, "--student-layers", 1, "--data", data, *OPTIONS, *SAMPLED)
    assert distil(*arguments, "--epochs", 4, "--out", tmp_path / "run") == 0
    assert tokens_per_step(teacher, tmp_path / "run") > 2.5


@pytest.mark.slow
def test_the_draft_that_is_written_is_one_for_its_teacher(teacher, run):
    """Its card says how much better than the undistilled student it does."""
    teacher.resolve(f"draft_model:model={run / 'draft'}")
    alone = jaxinfer.load(run / "draft")
    assert alone.config.num_layers == 1
    talk = [{"role": "user", "content": "hi"}]
    assert alone.encode_chat(talk) == teacher.encode_chat(talk)
    lines = read_metrics(run / "metrics.jsonl")
    evaluations = [line["evaluation"] for line in lines if "evaluation" in line]
    card = (run / "draft" / "README.md").read_text()
    best = max(figures["acceptance"] for figures in evaluations)
    shown = re.search(r"\| acceptance, `sum min\(p, q\)` \| [\d.]+% \| ([\d.]+)% \|", card)
    assert shown
    # Each is rounded, to digits of its own.
    assert float(shown[1]) == pytest.approx(100 * best, abs=0.06)
    assert (run / "curves.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
def test_a_stopped_run_goes_on_to_the_same_draft(trained_folder, data, run, tmp_path, monkeypatch):
    """Stopped in the middle of a round of samples, between two checkpoints; bit for bit."""
    arguments = ("--model", trained_folder, "--student-layers", 1, "--data", data, *OPTIONS, *SAMPLED)
    arguments = (*arguments, "--epochs", 1, "--save-every", 10, "--out", tmp_path / "run")
    place, calls = distill.place_batch, []

    def stop(batch, mesh):
        calls.append(batch)
        if len(calls) == 11:
            raise KeyboardInterrupt
        return place(batch, mesh)

    monkeypatch.setattr(distill, "place_batch", stop)
    assert distil(*arguments) == 130
    assert not (tmp_path / "run" / "draft").exists()
    monkeypatch.setattr(distill, "place_batch", place)
    assert distil(*arguments) == 0
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "run" / "draft" / name).read_bytes() == (run / "draft" / name).read_bytes()


@pytest.mark.exhaustive
def test_a_dry_run_says_what_a_run_takes_and_makes_nothing(trained_folder, data, tmp_path, capsys):
    arguments = ("--model", trained_folder, "--student-layers", 1, "--data", data, *OPTIONS, *SAMPLED)
    assert distil(*arguments, "--epochs", 1, "--out", tmp_path / "run", "--dry-run") == 0
    lines = capsys.readouterr().out
    assert "memory of a step: " in lines
    assert "GFLOP a step" in lines
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_mistakes_end_in_one_line(trained_folder, data, run, tiny_llama_folder, tmp_path, capsys):
    same, pruned = ("--model", trained_folder, "--data", data), ("--student-layers", 1)
    long, foreign = tmp_path / "long.jsonl", tmp_path / "foreign.json"
    long.write_text(json.dumps({"text": "x" * 2000}) + "\n")
    other = save_hf_folder(tmp_path / "other", replace(TRAINED_LLAMA, vocab_size=300), _drawn(300))
    description = json.loads((other / "config.json").read_text())
    foreign.write_text(json.dumps({**description, "vocab_size": 999}))
    gpt2 = tmp_path / "gpt2.json"
    gpt2.write_text(
        json.dumps({"model_type": "gpt2", "vocab_size": 258, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 64})
    )
    cases = {
        "invalid choice: 'cosine'": (*same, *pruned, "--divergence", "cosine"),
        f"{long}, line 1: the text has 2000 tokens, but there is room for 64": (
            *("--model", trained_folder, "--data", long, *pruned),
        ),
        f"--student {other}: has 300 tokens, the teacher 258": (*same, "--student", other),
        f"--student {foreign}: has 999 tokens, the teacher 258": (*same, "--student", foreign),
        "family 'gpt2' cannot be written": (*same, "--student", gpt2),
        "not allowed with argument": (*same, *pruned, "--student", trained_folder),
        "one of the arguments --student --student-layers is required": same,
        "--student-layers 5: give a number from 1 to 2": (*same, "--student-layers", 5),
        "--student-layers 0,2: give rising indices from 0 to 1": (*same, "--student-layers", "0,2"),
        "--student-layers half: give a number": (*same, "--student-layers", "half"),
        "'1.5' is not a number from 0 to 1": (*same, *pruned, "--on-policy", 1.5),
        "holds a run with": ("--model", tiny_llama_folder(), "--data", data, *pruned, "--out", run),
    }
    for complaint, arguments in cases.items():
        assert distil("--out", tmp_path / "run", *OPTIONS, *arguments) == 2, complaint
        errors = capsys.readouterr().err
        assert complaint in errors
        assert errors.startswith("error: ")
        assert errors.count("\n") == 1
    assert not (tmp_path / "run").exists()
    assert (run / "draft" / "model.safetensors").is_file()


def _drawn(vocab_size):
    from tests.toys import random_params

    return random_params(replace(TRAINED_LLAMA, vocab_size=vocab_size))


@pytest.mark.slow
def test_a_student_may_be_drawn_or_be_any_model_of_the_same_vocabulary(teacher, trained_folder, run, tmp_path):
    description = json.loads((run / "draft" / "config.json").read_text())
    (tmp_path / "small.json").write_text(json.dumps({**description, "hidden_size": 16, "num_hidden_layers": 2}))
    drawn = open_student(str(tmp_path / "small.json"), teacher, seed=3)
    assert (drawn.config.model_dim, drawn.config.num_layers) == (16, 2)
    loaded = open_student(str(trained_folder), teacher, seed=0)
    same_tree(loaded.params, teacher.params)
