"""Faults of DFlash drafters: what a block sees and says, their files, and their training."""

from tests.mutants.fault import Fault

_MODEL, _STRATEGY = "jaxinfer/models/drafters/dflash.py", "jaxinfer/decoding/strategies/dflash.py"
_FILES, _LOSS = "jaxinfer/checkpoint/drafters/dflash.py", "train/dflash/loss.py"
_BLOCKS = "tests/models/drafters/test_dflash.py::test_blocks_are_those_of_the_published_module[published]"
_OF_STRATEGY = "tests/decoding/strategies/test_dflash.py::"
_DRAFTS = f"{_OF_STRATEGY}test_drafts_are_taken_as_the_published_module_has_them"
_OF_FILES, _OF_LOSS = "tests/checkpoint/drafters/test_dflash.py::", "tests/train/dflash/test_loss.py::"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "places of a block see those before them alone",
        _MODEL,
        "if kind.window is None else",
        "if kind.window is not None else",
        _BLOCKS,
    ),
    Fault(
        "unknown places of a block are token 0",
        _MODEL,
        "self.dflash.mask_token, tokens_BC.dtype",
        "0, tokens_BC.dtype",
        _BLOCKS,
    ),
    Fault(
        "the context is not normed",
        _MODEL,
        'return cast(jax.Array, norm.apply({"params": self.params["hidden_norm"]}, joined_BTD))',
        "return joined_BTD",
        _BLOCKS,
    ),
    Fault(
        "a block knows the last token of a step alone",
        _STRATEGY,
        "first_B = jnp.maximum(start_B - self.catch_up, 0)",
        "first_B = jnp.maximum(start_B - 1, 0)",
        _DRAFTS,
    ),
    Fault(
        "a block drafts what its first place says",
        _STRATEGY,
        "hidden_BND[:, 1 : 1 + self.max_depth]",
        "hidden_BND[:, : self.max_depth]",
        _DRAFTS,
    ),
    Fault(
        "features are read in the order of the layers",
        _STRATEGY,
        "features.read(slots_BT, self.dflash.features)",
        "features.read(slots_BT, self.features)",
        f"{_OF_STRATEGY}test_features_are_read_in_the_order_of_the_file",
    ),
    Fault(
        "the inputs of the layers in the file are read",
        _FILES,
        "return tuple(one + 1 for one in ids)",
        "return tuple(ids)",
        _BLOCKS,
    ),
    Fault(
        "drafters of another vocabulary are read",
        _FILES,
        '"tokens": (decoder.vocab_size, config.num_tokens)',
        '"tokens": (config.num_tokens, config.num_tokens)',
        f"{_OF_FILES}test_a_drafter_of_another_base_is_refused[vocabulary]",
    ),
    Fault(
        "relatives of DFlash are read as such",
        _FILES,
        "if section.get(key, neutral) != neutral:",
        "if False:",
        f"{_OF_FILES}test_what_cannot_be_is_refused_in_one_line[a relative]",
    ),
    Fault(
        "in training a block sees the features of its anchor",
        _LOSS,
        "(jnp.arange(num_tokens) <= picks_BP[..., None])",
        "(jnp.arange(num_tokens) <= picks_BP[..., None] + 1)",
        f"{_OF_LOSS}test_loss_is_the_formula_written_out[0.3]",
    ),
    Fault(
        "in training blocks see each other",
        _LOSS,
        "np.kron(np.eye(num_picks, dtype=bool), np.ones((block_size, block_size), bool))",
        "np.ones((num_picks * block_size, num_picks * block_size), bool)",
        f"{_OF_LOSS}test_loss_is_the_formula_written_out[0.3]",
    ),
    Fault(
        "places are judged that no text comes to",
        "train/dflash/evaluation.py",
        "tried_BPJ = (reached_BPJ > 0) & is_valid_BPJ",
        "tried_BPJ = is_valid_BPJ",
        f"{_OF_LOSS}test_a_block_is_judged_as_far_as_it_is_right",
    ),
)
