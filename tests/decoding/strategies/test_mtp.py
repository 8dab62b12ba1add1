"""The layer for further tokens drafts what transformers' own blocks would, in both published layouts."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jaxinfer
from jaxinfer import SamplingParams
from jaxinfer.errors import InvalidCheckpoint, InvalidOption
from tests.decoding.recorded import record
from tests.decoding.rows import request
from tests.late_imports import late
from tests.models.hugging_face import build_model
from tests.models.variants import VARIANTS
from tests.models.variants.variant import Variant

torch = late("torch")
late("transformers")

PROMPTS = [np.random.default_rng(length).integers(2, 96, length).tolist() for length in (9, 2)]
MIMO = Variant({"use_sliding_window": False}, model_type="qwen2")
GLM = next(variant for variant in VARIANTS.values() if variant.model_type == "glm4_moe")
MODELS = {"mimo": MIMO, "glm": GLM, "deepseek": VARIANTS["deepseek_v3-bias"]}
# Of few tokens, drafts are often right.
LIKELY = (5, 9, 40)
SAMPLING = SamplingParams(logit_bias=dict.fromkeys(LIKELY, 50.0))
# The names of the layer's own tensors: norms of token and hidden state, projection, last norm.
NAMES = {
    "mimo": ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
    "glm": ("enorm", "hnorm", "eh_proj", "shared_head.norm"),
}
NAMES["deepseek"] = NAMES["glm"]


class Reference:
    """A published model with its layer, by transformers' modules."""

    def __init__(self, kind: str):
        from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
        from transformers.models.glm4_moe import modeling_glm4_moe as glm
        from transformers.models.qwen2 import modeling_qwen2 as qwen2

        self.kind, self.model = kind, build_model(MODELS[kind])
        config = self.model.config
        config._attn_implementation = "eager"
        layers = {"mimo": qwen2.Qwen2DecoderLayer, "glm": glm.Glm4MoeDecoderLayer}
        make_block = {**layers, "deepseek": deepseek.DeepseekV3DecoderLayer}[kind]
        width = config.hidden_size
        # Of the last layer's kind: with experts, if there are any.
        self.block = make_block(config, 0 if kind == "mimo" else config.num_hidden_layers - 1).eval()
        norms = [qwen2.Qwen2RMSNorm(width, config.rms_norm_eps) for _ in range(3)]
        self.token_norm, self.hidden_norm, self.final_norm = norms
        self.project = torch.nn.Linear(2 * width, width, bias=False)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for module in (self.block, *norms, self.project):
                for weight in [*module.parameters(), *(b for n, b in module.named_buffers() if "correction" in n)]:
                    noise = torch.randn(weight.shape, generator=generator)
                    weight.copy_(1 + 0.3 * noise if weight.ndim == 1 else noise * weight.shape[-1] ** -0.5)

    def drafts(self, text: list[int], count: int) -> list[int]:
        """Draft after a text, all of whose pairs of hidden state and next token are run anew for every draft."""
        with torch.no_grad():
            embed = self.model.get_input_embeddings()
            hidden = self.model.model(torch.tensor([text])).last_hidden_state[0][:-1]
            tokens, found = text[1:], []
            for _ in range(count):
                embedded = embed(torch.tensor(tokens))
                embedded[0] = 0
                pair = [self.hidden_norm(hidden), self.token_norm(embedded)]
                joined = self.project(torch.cat(pair if self.kind == "mimo" else pair[::-1], dim=-1))[None]
                positions = torch.arange(len(tokens))[None]
                mask = torch.full((len(tokens), len(tokens)), -torch.inf).triu(1)[None, None]
                rotary = self.model.model.rotary_emb(joined, positions)
                out = self.block(joined, attention_mask=mask, position_ids=positions, position_embeddings=rotary)
                out = (out[0] if isinstance(out, tuple) else out)[0]
                normed = self.final_norm(out)
                found.append(max(LIKELY, key=self.model.lm_head(normed[-1]).tolist().__getitem__))
                passed = normed if self.kind == "mimo" else out
                hidden = torch.cat([hidden, passed[-1:]])
                tokens = [*tokens, found[-1]]
        return found

    def write(self, folder: Path) -> Path:
        """Write the model in its published layout."""
        self.model.save_pretrained(folder)
        config = json.loads((folder / "config.json").read_text())
        if self.kind == "mimo":
            config |= {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_nextn_predict_layers": 1}
            place = "model.mtp_layers.0"
        else:
            config["num_nextn_predict_layers"] = 1
            place = f"model.layers.{config['num_hidden_layers']}"
        (folder / "config.json").write_text(json.dumps(config))
        tensors = load_file(folder / "model.safetensors")
        parts = (self.token_norm, self.hidden_norm, self.project, self.final_norm)
        tensors |= {
            f"{place}.{name}.weight": part.weight.detach().numpy() for name, part in zip(NAMES[self.kind], parts)
        }
        tensors |= {f"{place}.{name}": weight.detach().numpy() for name, weight in self.block.state_dict().items()}
        if self.kind != "mimo":
            tensors |= {f"{place}.embed_tokens.weight": np.zeros((97, 48), np.float32)}
            tensors = split_experts(tensors)
        save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, folder / "model.safetensors")
        return folder


def split_experts(tensors: dict[str, Any]) -> dict[str, Any]:
    """Return tensors of all experts as published ones, one for each."""
    made = {}
    for name, array in tensors.items():
        place, _, last = name.rpartition(".experts.")
        if not place or array.ndim < 3:
            made[name] = array
            continue
        for expert, matrix in enumerate(array):
            if last == "gate_up_proj":
                gate, up = np.split(matrix, 2)
                made |= {
                    f"{place}.experts.{expert}.{part}_proj.weight": one for part, one in (("gate", gate), ("up", up))
                }
            else:
                made[f"{place}.experts.{expert}.{last}.weight"] = matrix
    return made


@pytest.fixture(
    scope="module",
    params=[
        "mimo",
        pytest.param("glm", marks=pytest.mark.slow),
        pytest.param("deepseek", marks=pytest.mark.exhaustive),
    ],
)
def published(request, tmp_path_factory):
    reference = Reference(request.param)
    return reference, reference.write(tmp_path_factory.mktemp(request.param))


def test_drafts_are_those_of_transformers_blocks(published):
    """After the prompt, and after steps that took some drafts; from the layer's own output after the first."""
    reference, folder = published
    lm = jaxinfer.load(folder, dtype="float32")
    strategy = lm.resolve("mtp:num_draft_tokens=3")
    assert strategy.features == (lm.config.num_layers,)
    texts = set()
    for one in record(lm, strategy, [request(prompt, 20, SAMPLING) for prompt in PROMPTS], 4):
        texts.add(len(one.text))
        assert one.paths[-1] == reference.drafts(one.text, 3)
    # Four steps without a draft would pass through all lengths of the shorter text.
    assert max(texts) > len(PROMPTS[0]) + 5 or not set(range(3, 9)) <= texts


def test_the_model_alone_reads_none_of_the_layer(published, monkeypatch):
    reference, folder = published
    from jaxinfer.checkpoint.safetensors_file import SafetensorsFile

    read, whole = set(), SafetensorsFile.read
    monkeypatch.setattr(
        SafetensorsFile, "read", lambda self, name, dtype: (read.add(name), whole(self, name, dtype))[1]
    )
    lm = jaxinfer.load(folder)
    assert read
    assert not any("mtp" in name or f"layers.{lm.config.num_layers}." in name for name in read)
    np.testing.assert_allclose(
        np.asarray(lm.logits(PROMPTS[:1]))[0],
        reference.model(torch.tensor(PROMPTS[:1])).logits[0].detach().numpy(),
        atol=2e-3,
    )


def test_what_has_no_layer_or_half_of_one_is_refused_in_a_line(published, tmp_path, tiny_llama_folder):
    _, folder = published
    without = jaxinfer.load(tiny_llama_folder())
    with pytest.raises(InvalidOption, match="no layer that predicts further tokens after its 2 layers"):
        without.resolve("mtp")
    with pytest.raises(InvalidOption, match="no layer that predicts further tokens"):
        jaxinfer.load(folder, layers=1).resolve("mtp")
    lm = jaxinfer.load(folder)
    lm.source = None
    with pytest.raises(InvalidOption, match="this model is of no checkpoint"):
        lm.resolve("mtp")
    assert lm.resolve(f"mtp:heads={folder}").parameters
    tensors = load_file(folder / "model.safetensors")
    norm = next(name for name in tensors if name.endswith(("hnorm.weight", "hidden_layernorm.weight")))
    for changed, mend in (({}, "missing tensor"), ({norm: np.ones(5, np.float32)}, r"has shape \[5\], not \[48\]")):
        half = {name: array for name, array in tensors.items() if name != norm} | changed
        save_file(half, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text((folder / "config.json").read_text())
        with pytest.raises(InvalidCheckpoint, match=mend):
            lm.resolve(f"mtp:heads={tmp_path}")
