"""Faults of EAGLE: what its layer reads and sees, how it catches up, which files it takes, and what training does."""

from tests.mutants.fault import Fault

_STRATEGY, _FILES = "jaxinfer/decoding/strategies/eagle.py", "jaxinfer/checkpoint/drafters/eagle.py"
_LAYER, _UNROLL, _LOSS = "jaxinfer/models/drafters/eagle.py", "train/eagle/unroll.py", "train/eagle/loss.py"
_PIECES = "train/loop/position_pieces.py"
_OF_DRAFTS = (
    "tests/decoding/strategies/test_eagle.py::"
    "test_it_drafts_what_the_published_module_does_after_others_drafts_were_taken[eagle3]"
)
_OF_VOCABULARY = "tests/train/eagle/test_eagle.py::test_a_drafter_without_an_output_matrix_goes_on_with_other_tokens"
_OF_FILES = "tests/decoding/strategies/test_eagle.py::test_what_is_no_drafter_for_the_model_is_refused_by_one_line"
_OF_LOSS = "tests/train/eagle/test_loss.py::test_the_loss_is_that_of_drafting_along_each_text[False]"
_OF_PIECES = "tests/train/loop/test_position_pieces.py::test_it_is_the_loss_and_the_gradient_of_all_at_once"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "features are joined without the norms that the file has for them",
        _LAYER,
        "features_BTF = jnp.concatenate(parts, axis=-1).astype(dtype)",
        "features_BTF = features_BTF.astype(dtype)",
        "tests/decoding/strategies/test_eagle.py::"
        "test_features_are_normed_before_they_are_joined_as_the_file_says[fc_norm]",
    ),
    Fault(
        "layers that speculators lists are taken for those after which features are read",
        _FILES,
        "if _DESCRIBED in settings and isinstance(listed, list):",
        "if False:",
        "tests/decoding/strategies/test_eagle.py::"
        "test_features_are_normed_before_they_are_joined_as_the_file_says[input_norm]",
    ),
    Fault(
        "a drafter in a sum catches up with its own depth alone",
        _STRATEGY,
        "return replace(self, catch_up=max_depth + 1)",
        "return self",
        _OF_DRAFTS,
    ),
    Fault(
        "a node of a tree sees its siblings",
        _STRATEGY,
        "take_rows(carried.sees_BWN, beams.origins_BW) | own_WN",
        "take_rows(carried.sees_BWN, beams.origins_BW) | (own_WN | own_WN.any(axis=0))",
        _OF_DRAFTS,
    ),
    Fault(
        "a node stands at the position of its parent",
        _STRATEGY,
        "start_B[:, None] + depth - 2, (batch, width)",
        "start_B[:, None] + depth - 3, (batch, width)",
        _OF_DRAFTS,
    ),
    Fault(
        "a place reads its own token in place of the next",
        _STRATEGY,
        "jnp.take_along_axis(state.tokens_BS, slots_BT + 1, axis=1",
        "jnp.take_along_axis(state.tokens_BS, slots_BT, axis=1",
        _OF_DRAFTS,
    ),
    Fault(
        "children follow the output of another beam",
        _STRATEGY,
        "before_BWD = take_rows(carried.hidden_BWD, beams.origins_BW)",
        "before_BWD = take_rows(carried.hidden_BWD, 0 * beams.origins_BW)",
        _OF_DRAFTS,
    ),
    Fault(
        "attention adds to the normed features",
        _LAYER,
        "normed_BTD if shape.norm_before_residual else inputs_BTD",
        "inputs_BTD if shape.norm_before_residual else normed_BTD",
        _OF_DRAFTS,
    ),
    Fault(
        "rows of a draft vocabulary are taken for token ids",
        _FILES,
        "ids = np.arange(rows) + tensors.read",
        "ids = 0 * np.arange(rows) + tensors.read",
        _OF_DRAFTS,
    ),
    Fault(
        "a drafter of other weights is taken",
        _FILES,
        "check_fingerprint(folder, settings.get(_FINGERPRINT), fingerprint)",
        "check_fingerprint(folder, None, fingerprint)",
        f"{_OF_FILES}[other weights]",
    ),
    Fault(
        "tensors without a place are passed over",
        _FILES,
        "if extra := sorted(name for name in shapes if name not in placed",
        "if extra := sorted(name for name in () if name not in placed",
        f"{_OF_FILES}[a further tensor]",
    ),
    Fault(
        "on a CPU a drafter's layer keeps its own bits",
        _STRATEGY,
        "{name: matrices_in_four_bits(part, inner) for name, part",
        "{name: part for name, part",
        "tests/decoding/strategies/test_eagle.py::test_on_a_cpu_it_drafts_what_the_module_does_with_matrices_in_four_bits[3]",
    ),
    Fault(
        "training attends to no later step",
        _UNROLL,
        "own = weights[..., num_tokens + step]",
        "own = 0 * weights[..., num_tokens + step]",
        _OF_LOSS,
    ),
    Fault(
        "training attends to the texts before in a row",
        _UNROLL,
        "Placement(slots_BT, is_text_BTS & causal_ancestors(segments_BT.shape[1])[None])",
        "Placement(slots_BT, (is_text_BTS | True) & causal_ancestors(segments_BT.shape[1])[None])",
        _OF_LOSS,
    ),
    Fault(
        "training does not turn later steps on",
        _UNROLL,
        "positions_BT + step, cache",
        "positions_BT, cache",
        _OF_LOSS,
    ),
    Fault(
        "every step counts as much as the first",
        _LOSS,
        "total += self.decay**step * loss",
        "total += loss",
        _OF_LOSS,
    ),
    Fault(
        "training asks for tokens outside the draft vocabulary",
        _LOSS,
        "valid_BT = asked_BT & is_known_BT",
        "valid_BT = asked_BT",
        _OF_LOSS,
    ),
    Fault(
        "a step is compared with the teacher of the token before",
        _LOSS,
        "ordered(ahead(hidden_BTD, -step - 1))",
        "ordered(ahead(hidden_BTD, -step))",
        _OF_LOSS,
    ),
    Fault(
        "a loss in pieces ends with the last whole one",
        _PIECES,
        "(count + size - 1) // size",
        "count // size",
        f"{_OF_PIECES}[4-9]",
    ),
    Fault(
        "a loss in pieces has gradients of one size whatever it is multiplied by",
        _PIECES,
        "(leaf * of_loss).astype",
        "leaf.astype",
        f"{_OF_PIECES}[4-9]",
    ),
    Fault(
        "a new drafter takes the lowest features for the highest",
        "train/eagle/start.py",
        "jnp.eye(width, shape.fc_width, k=shape.fc_width - width)",
        "jnp.eye(width, shape.fc_width)",
        "tests/train/eagle/test_start.py::test_without_its_random_part_it_computes_what_the_last_layer_does",
    ),
    Fault(
        "a drafter that may guess other tokens keeps its old ones",
        "train/eagle/__main__.py",
        'params.get("ids") if options.draft_vocab is None else ids',
        'params.get("ids")',
        _OF_VOCABULARY,
    ),
    Fault(
        "a run goes on though it began with another drafter",
        "train/eagle/__main__.py",
        "None if params is None else digest(jax.tree.leaves(params))",
        "None",
        _OF_VOCABULARY,
    ),
)
