"""The models that plans are made for by name."""

import json

import jax
import pytest

from jaxinfer.errors import CheckpointNotFound, UnsupportedModel
from jaxinfer.models.decoder import abstract_params
from jaxinfer.ops.backend import choose_backend
from jaxinfer.planning.known_models import known_models, planned_config
from tests.planning.models import LLAMA_2_7B, LLAMA_3_8B


def _further_layer(model_dim: int, queries: int, experts: int, width: int, norms: int = 0) -> int:
    """Return the numbers of GLM-4.5's layer for a further token, with its own embedding and output matrix."""
    rows = queries + 2 * 1024  # biased
    attention = rows * (model_dim + 1) + queries * model_dim + norms
    mixture = 3 * model_dim * width * (experts + 1) + experts * (model_dim + 1)
    return attention + mixture + 2 * model_dim + model_dim * (2 * model_dim + 3) + 2 * 151552 * model_dim


# As the Hugging Face hub counts the tensors of each; those of Qwen3-0.6B and 1.7B without the output matrix, which is
# the embedding and is stored there, too; those of OPT-66B, which is pickled there, and of text decoders beside a vision
# model by their published sizes. Those of Apertus with a number of each layer that is a buffer there; those of GLM-4.5
# without the layer that predicts a further token. Of Apertus-70B, Trinity-Mini and Hunyuan-MT-7B, computed: only
# whole billions of theirs were found; of Phi-3.5-MoE, computed and 41.9 billion as published.
PUBLISHED = {
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "mistral-7b": 7_248_023_552,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "phi-2": 2_779_683_840,
    "opt-1.3b": 1_315_758_080,
    "opt-6.7b": 6_658_473_984,
    "opt-66b": 65_719_701_504,
    "smollm2-135m": 134_515_008,
    "olmo-2-7b": 7_298_617_344,
    "smollm3-3b": 3_075_098_624,
    "granite-3.3-8b": 8_170_864_640,
    "glm-4-9b": 9_399_951_360,
    "falcon3-7b": 7_455_550_464,
    "starcoder2-7b": 7_173_923_840,
    "command-r": 34_980_831_232,
    "command-r7b": 8_028_033_024,
    "pythia-6.9b": 6_857_302_016,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_419_200,
    "llama-4-scout": 107_769_861_120,
    "llama-4-maverick": 400_711_848_960,
    "dots.llm1": 142_774_381_696,
    "ernie-4.5-21b-a3b": 21_825_437_888,
    "minimax-m2": 228_689_764_864,
    "hunyuan-a13b": 80_393_183_232,
    "ministral-3-8b": 8_489_553_920,
    "seed-oss-36b": 36_151_104_512,
    "olmo-3-7b": 7_298_011_136,
    "olmo-3-32b": 32_233_522_176,
    "granite-4.0-micro": 3_402_836_480,
    "apertus-8b": 8_053_338_176 + 32,
    "apertus-70b": 70_599_864_480 + 80,
    "exaone-4.0-32b": 32_003_216_384,
    "glm-4.5": 358_337_791_296 - _further_layer(5120, 96 * 128, 160, 1536, norms=256),
    "glm-4.5-air": 110_468_824_832 - _further_layer(4096, 96 * 128, 128, 1408),
    "dbrx": 131_596_523_520,
    "trinity-mini": 26_123_974_400,
    "phi-3.5-moe": 41_873_153_344,
    "hunyuan-mt-7b": 7_504_932_864,
}


def test_all_are_held_to_their_published_sizes():
    assert set(PUBLISHED) == set(known_models())


# Of each family one; the others differ from these in their sizes alone.
ORDINARY = (
    "llama-2-7b",
    "llama-3-8b",
    "mistral-7b",
    "qwen3-8b",
    "gemma-2-2b",
    "phi-2",
    "opt-1.3b",
    "smollm2-135m",
)


@pytest.mark.parametrize(
    "name", [name if name in ORDINARY else pytest.param(name, marks=pytest.mark.exhaustive) for name in PUBLISHED]
)
def test_a_model_has_as_many_parameters_as_published(name):
    params = abstract_params(planned_config(name), choose_backend("bfloat16", platform="tpu"))
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == PUBLISHED[name]


def test_names_and_configurations_mean_the_same_decoder(tmp_path):
    assert planned_config("llama-2-7b") == LLAMA_2_7B
    assert planned_config("Llama-3-8B-Instruct") == LLAMA_3_8B
    written = {"model_type": "llama", "num_hidden_layers": 3, "eos_token_id": 2}
    (tmp_path / "config.json").write_text(json.dumps(written))
    assert planned_config(str(tmp_path)) == planned_config(str(tmp_path / "config.json"))
    assert planned_config(str(tmp_path)).num_layers == 3


def test_what_is_no_model_is_refused(tmp_path):
    with pytest.raises(CheckpointNotFound, match=r"'llama-9'.*no built-in model: llama-2-7b, "):
        planned_config("llama-9")
    with pytest.raises(CheckpointNotFound, match=r"config\.json"):
        planned_config(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(UnsupportedModel, match="mamba"):
        planned_config(str(tmp_path))
