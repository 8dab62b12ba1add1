"""Faults of the trainers: each loss and schedule, packing, resumption, and what is written and told in the end."""

from tests.mutants.fault import Fault

_TESTS = "tests/train"
_HEADS, _JOINT, _STREAMS = (f"train/{name}.py" for name in ("heads/loss", "heads/joint_loss", "streams/loss"))
_EXITS, _SCHEDULES = (f"train/layerskip/{name}.py" for name in ("loss", "schedules"))
_DIVERGENCES, _DISTILL = (f"train/distill/{name}.py" for name in ("divergences", "loss"))

_OF_HEADS = f"{_TESTS}/heads/test_loss.py::test_loss_is_the_formula_written_out_and_heads_alone_learn"
_OF_JOINT = f"{_TESTS}/heads/test_joint.py::test_the_loss_is_the_bases_and_the_weighed_heads"
_OF_STREAMS = f"{_TESTS}/streams/test_loss.py::test_loss_is_the_formula_written_out"
_OF_EXITS = f"{_TESTS}/layerskip/test_early_exit.py"
_OF_DIVERGENCES = f"{_TESTS}/distill/test_divergences.py"
_OF_STUDENTS = f"{_TESTS}/distill/test_distill.py::test_the_loss_is_the_formula_and_the_student_alone_learns"
_STOPPED = f"{_TESTS}/loop/test_fit.py::test_a_run_that_is_stopped_twice_ends_as_an_uninterrupted_one"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "head k foresees a token too near",
        _HEADS,
        "ahead = slice(index + 2, index + 2 + num_tokens)",
        "ahead = slice(index + 1, index + 1 + num_tokens)",
        f"{_TESTS}/heads/test_loss.py::test_of_a_conversation_only_answers_are_foreseen",
    ),
    Fault(
        "heads learn from the tokens of other texts",
        _HEADS,
        "known_BT = valid_BT & (target_BT >= 0)",
        "known_BT = target_BT >= 0",
        f"{_OF_HEADS}[medusa-0.3]",
    ),
    Fault(
        "the teacher of soft targets is a token behind",
        _HEADS,
        "ahead = slice(index + 1, index + 1 + num_tokens)",
        "ahead = slice(index, index + num_tokens)",
        f"{_OF_HEADS}[medusa-0.3]",
    ),
    Fault(
        "later heads weigh as much as the first",
        _HEADS,
        "total += self.decay**index * loss",
        "total += loss",
        f"{_OF_HEADS}[medusa-0.3]",
    ),
    Fault(
        "joint heads weigh more than they should",
        _JOINT,
        "share = jnp.mean(batch.weight_B) * self.heads.decay",
        "share = jnp.mean(batch.weight_B)",
        f"{_OF_JOINT}[two-stage]",
    ),
    Fault(
        "a joint base learns the token that it sees",
        _JOINT,
        "tokens_BT[:, 1:, None], axis=-1)",
        "tokens_BT[:, :-1, None], axis=-1)",
        f"{_OF_JOINT}[two-stage]",
    ),
    Fault(
        "a joint base is held to itself",
        _JOINT,
        "teacher_BTV = jax.nn.log_softmax(output_logits(decoder, base, original_BTD[:, :-1])",
        "teacher_BTV = jax.nn.log_softmax(output_logits(decoder, params, hidden_BTD[:, :-1])",
        f"{_OF_JOINT}[self-distillation]",
    ),
    Fault(
        "the weights of streams begin anew after the last",
        _STREAMS,
        "alpha[min(at, len(alpha) - 1)]",
        "alpha[at % len(alpha)]",
        f"{_OF_STREAMS}[0.3]",
    ),
    Fault(
        "the base learns from the early exit",
        _STREAMS,
        "exit_states(model, stream_params, jax.lax.stop_gradient(picked_BPD))",
        "exit_states(model, stream_params, picked_BPD)",
        f"{_TESTS}/streams/test_loss.py::test_nothing_but_the_early_exit_learns_from_the_early_exit",
    ),
    Fault(
        "streams foresee the next text of their row",
        _STREAMS,
        "inside_BPA & is_same_BPA & at(batch.is_target_BT)",
        "inside_BPA & at(batch.is_target_BT)",
        f"{_TESTS}/streams/test_loss.py::test_stream_j_foresees_the_token_j_plus_one_places_on_and_never_one_of_another_text",
    ),
    Fault(
        "the last layer's exit weighs as any other",
        _SCHEDULES,
        "weights_L[-1] = self.num_layers + self.exit_scale",
        "weights_L[-1] = self.exit_scale",
        f"{_OF_EXITS}::test_exits_weigh_more_with_depth",
    ),
    Fault(
        "layers are dropped from the first step on as at the last",
        _SCHEDULES,
        "share = _rise(step / max(1, self.num_steps - 1)) if self.from_scratch else 1.0",
        "share = 1.0",
        f"{_OF_EXITS}::test_layers_are_dropped_more_with_depth_and_time",
    ),
    Fault(
        "layers are kept as often as they should be dropped",
        _EXITS,
        ">= batch.rates_BL.T",
        "< batch.rates_BL.T",
        f"{_OF_EXITS}::test_the_loss_is_the_weighted_sum_of_every_exits_own",
    ),
    Fault(
        "one row's drawn layers are dropped for all rows",
        _EXITS,
        "jnp.where(kept_B[:, None, None], after_BTD, hidden_BTD)",
        "jnp.where(kept_B[0], after_BTD, hidden_BTD)",
        f"{_OF_EXITS}::test_a_dropped_layer_is_as_if_it_were_not_there_and_each_row_drops_its_own",
    ),
    Fault(
        "the forward divergence is the reverse one",
        _DIVERGENCES,
        "return _relative_entropy(teacher, student)",
        "return _relative_entropy(student, teacher)",
        f"{_OF_DIVERGENCES}::test_values_by_hand",
    ),
    Fault(
        "the reverse divergence is the forward one",
        _DIVERGENCES,
        'Return KL(Q || P)."""\n    return _relative_entropy(student, teacher)',
        'Return KL(Q || P)."""\n    return _relative_entropy(teacher, student)',
        f"{_OF_DIVERGENCES}::test_gradients_are_those_of_the_formulas",
    ),
    Fault(
        "the mixture of the Jensen-Shannon divergence has its weights exchanged",
        _DIVERGENCES,
        "jnp.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))",
        "jnp.logaddexp(teacher + math.log1p(-beta), student + math.log(beta))",
        f"{_OF_DIVERGENCES}::test_values_by_hand",
    ),
    Fault(
        "total variation counts what is lost and what is gained",
        _DIVERGENCES,
        "return 0.5 * jnp.sum(",
        "return jnp.sum(",
        f"{_OF_DIVERGENCES}::test_acceptance_is_one_less_total_variation",
    ),
    Fault(
        "the student is judged at another temperature than its teacher",
        _DISTILL,
        "log_q = log_probs(raw_BTV, self.temperature)",
        "log_q = log_probs(raw_BTV, 1.0)",
        _OF_STUDENTS,
    ),
    Fault(
        "a student learns its own texts as if they were right",
        _DISTILL,
        "next_ones.counts_BT & ~jnp.asarray(batch.is_sampled_B)[:, None]",
        "next_ones.counts_BT",
        _OF_STUDENTS,
    ),
    Fault(
        "texts of one row see each other",
        "train/loop/whole_text.py",
        "ancestors_BTT & (segments_BT[:, :, None] == segments_BT[:, None, :])",
        "ancestors_BTT & (segments_BT[:, :, None] >= 0)",
        f"{_TESTS}/loop/test_whole_text.py::test_texts_of_one_row_are_as_if_alone",
    ),
    Fault(
        "the first token of a text is predicted from the text before it",
        "train/loop/step.py",
        "counts_BT & (segments_BT[:, 1:] == segments_BT[:, :-1])",
        "counts_BT & (segments_BT[:, 1:] > 0)",
        f"{_TESTS}/loop/test_whole_text.py::test_a_packed_row_counts_no_token_that_begins_a_text",
    ),
    Fault(
        "padding of a packed row is predicted",
        "train/texts/packing.py",
        "np.zeros_like(tokens_BT, bool), np.zeros_like(tokens_BT)",
        "np.ones_like(tokens_BT, bool), np.zeros_like(tokens_BT)",
        f"{_TESTS}/texts/test_examples.py::test_packing_keeps_every_text_whole_and_none_twice",
    ),
    Fault(
        "every epoch has the same order",
        "train/texts/packing.py",
        "np.random.default_rng((self._seed, epoch))",
        "np.random.default_rng(self._seed)",
        f"{_TESTS}/texts/test_examples.py::test_an_order_visits_everything_once_an_epoch_and_is_a_function_of_the_step",
    ),
    Fault(
        "merged adapters forget their scale",
        "train/model/lora.py",
        'jnp.matmul(adapter["up"] * scale, adapter["down"]',
        'jnp.matmul(adapter["up"], adapter["down"]',
        f"{_TESTS}/model/test_lora.py::test_new_adapters_change_nothing_and_merged_ones_what_they_did",
    ),
    Fault(
        "a quantized kernel forgets its scales",
        "train/model/quantized.py",
        "return _qwix().dequantize(self.stored)",
        "return self.stored.qvalue.astype(self.dtype)",
        f"{_TESTS}/heads/test_joint.py::test_quantized_kernels_are_near_and_small[int8-0.006]",
    ),
    Fault(
        "means over microbatches are added up as if all had as many tokens",
        "train/loop/step.py",
        "jax.tree.map(jnp.add, sums, differentiate(*one)), None",
        "jax.tree.map(jnp.add, sums, jax.tree.map(lambda leaf: leaf / 4, differentiate(*one))), None",
        f"{_TESTS}/loop/test_step.py::test_accumulation_is_one_large_batch",
    ),
    Fault(
        "a resumed run begins to count anew",
        "train/loop/fit.py",
        "at = saved = int(state.train.step)",
        "at = saved = 0",
        _STOPPED,
    ),
    Fault(
        "a resumed run keeps the lines of steps that were lost",
        "train/loop/fit.py",
        'if line["step"] <= resumed_at]',
        'if line["step"] <= resumed_at + 1]',
        _STOPPED,
    ),
    Fault(
        "the last parameters are the result, not the best",
        "train/loop/fit.py",
        "params = fit_state.best if evaluates and best_step else fit_state.train.params",
        "params = fit_state.train.params",
        f"{_TESTS}/loop/test_fit.py::test_the_best_parameters_are_the_result",
    ),
    Fault(
        "every checkpoint is kept",
        "train/loop/checkpoints.py",
        "max_to_keep=keep",
        "max_to_keep=None",
        _STOPPED,
    ),
    Fault(
        "stacked layers are written in the opposite order",
        "train/model/export.py",
        "for layer, part in zip(layers, parts, strict=True)",
        "for layer, part in zip(reversed(layers), parts, strict=True)",
        f"{_TESTS}/model/test_export.py::test_loading_what_was_saved_gives_identical_logits",
    ),
    Fault(
        "a card's columns are single ranks, not the best so many",
        "train/heads/card.py",
        "100 * sum(ranks[:count])",
        "100 * ranks[count - 1]",
        f"{_TESTS}/heads/test_loss.py::test_a_card_adds_up_the_best_ranks",
    ),
    Fault(
        "texts that are held out are trained on too",
        "train/texts/rows.py",
        "return shuffled[num_held_out:], shuffled[:num_held_out]",
        "return shuffled, shuffled[:num_held_out]",
        f"{_TESTS}/texts/test_examples.py::test_texts_are_trained_on_or_held_out_and_never_both",
    ),
    Fault(
        "an answer with other blanks than its reference is wrong",
        "train/quality.py",
        '{" ".join(one.split()) for one in references}',
        "set(references)",
        f"{_TESTS}/test_quality.py::test_the_marks_are_those_of_the_references",
    ),
    Fault(
        "a prompt that was cut off counts as one",
        "train/data/self_prompts.py",
        'if text and result.finish_reason == "stop":',
        "if text:",
        f"{_TESTS}/data/test_self_prompts.py::test_a_model_that_writes_no_prompt_is_told",
    ),
    Fault(
        "heads are said to be for the rounded weights alone",
        "train/medusa.py",
        "base = lm.base_fingerprint",
        "base = lm.fingerprint",
        "tests/train/heads/test_medusa.py::test_heads_are_trained_on_a_base_in_few_bits",
    ),
    Fault(
        "weights that are trained for few bits are not rounded in the loss",
        "train/distill/own_teacher.py",
        "self.distill(self.prepare(trained), frozen",
        "self.distill(trained, frozen",
        "tests/train/qat/test_qat.py::test_what_is_written_is_nearer_to_the_teacher_than_what_is_rounded",
    ),
    Fault(
        "gradients of rounded weights are weighed by the weights",
        "train/qat/rounding.py",
        "return (gradient,)",
        "return (gradient * gradient,)",
        "tests/train/qat/test_qat.py::test_rounding_in_a_forward_pass_is_that_of_few_bits_and_gradients_pass_it",
    ),
    Fault(
        "tables are trained as if nothing rounded them",
        "train/qat/rounding.py",
        "        if is_table(names):\n            chosen = form.of_tables\n        elif",
        "        if",
        "tests/train/qat/test_qat.py::test_rounding_in_a_forward_pass_is_that_of_few_bits_and_gradients_pass_it",
    ),
)
