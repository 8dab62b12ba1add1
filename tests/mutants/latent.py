"""Faults of latent attention: its products, its rows, its tensors, and what is counted of them."""

from tests.mutants.fault import Fault

PARITY = "tests/models/test_parity.py::test_logits_equal_those_of_transformers[deepseek_v2-groups-yarn]"
LATENT = "tests/models/test_latent.py::"
PUBLISHED = "tests/models/families/test_published_latent.py::test_published_configurations_are_read"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "values are mixed with the rotated key",
        "jaxinfer/models/latent_attention.py",
        "mixed_BTNH[..., rotary_dim : config.head_dim]",
        "mixed_BTNH[..., : config.head_dim - rotary_dim]",
        PARITY,
    ),
    Fault(
        "the latent is not normed",
        "jaxinfer/models/latent_attention.py",
        'norm("latent_norm", latent_BTR)[:, :, None]',
        '(latent_BTR + 0 * norm("latent_norm", latent_BTR))[:, :, None]',
        PARITY,
    ),
    Fault(
        "norms of compressed vectors have the epsilon of others",
        "jaxinfer/models/latent_attention.py",
        "replace(config, norm_eps=NORM_EPS)",
        "replace(config, norm_eps=config.norm_eps)",
        PARITY,
    ),
    Fault(
        "a cache of latent attention has values too",
        "jaxinfer/models/decoder.py",
        "has_values = config.latent is None",
        "has_values = True",
        LATENT + "test_a_token_takes_one_row_a_layer",
    ),
    Fault(
        "an engine counts two rows a token",
        "jaxinfer/engine/memory.py",
        "buffers = 2 if model.latent is None else 1",
        "buffers = 2",
        LATENT + "test_a_token_takes_one_row_a_layer",
    ),
    Fault(
        "matrices of heads are saved as they are used",
        "jaxinfer/checkpoint/loaded.py",
        "turned = self._unpadded(leaf, layer).swapaxes(1, 2)",
        "turned = self._unpadded(leaf, layer)",
        LATENT + "test_a_saved_model_is_the_same",
    ),
    Fault(
        "YaRN's magnitude is not that of scores",
        "jaxinfer/models/families/keys/latent_keys.py",
        "return 0.1 * scaling.mscale_all_dim * math.log(scaling.factor) + 1.0",
        "return 1.0",
        PUBLISHED + "[DeepSeek-V3]",
    ),
    Fault(
        "groups of DeepSeek-V2 are compared by their two best",
        "jaxinfer/models/families/keys/grouped_experts.py",
        'group_score="two_best" if is_sigmoid else "best"',
        'group_score="two_best"',
        PUBLISHED + "[DeepSeek-V2]",
    ),
)
