"""``/v1/embeddings``: what its requests may say, and the form of its answers."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxinfer.notation import Float
from jaxinfer.server.api.completions import read_prompts
from jaxinfer.server.api.errors import wrong_field
from jaxinfer.server.api.fields import Fields, shown
from jaxinfer.server.api.sampling import Limits, check_model
from jaxinfer.tokenizers import Tokenizer

_MOST_TEXTS = 2048
_FORMATS = ("float", "base64")


@dataclass(frozen=True)
class EmbeddingJob:
    """A checked request: texts of ids, whether their embeddings are wanted in base64, and the adapter that is named."""

    texts: tuple[tuple[int, ...], ...]
    is_base64: bool
    adapter: str | None = None

    @property
    def num_tokens(self) -> int:
        """The tokens of all texts."""
        return sum(map(len, self.texts))


def read_embeddings(body: Mapping[str, Any], limits: Limits, tokenizer: Tokenizer, dimensions: int) -> EmbeddingJob:
    """Check a request for embeddings, which have so many ``dimensions``."""
    fields = Fields(body)
    adapter = check_model(fields, limits)
    given = read_prompts(fields.required("input"), "input")
    if len(given) > _MOST_TEXTS:
        raise wrong_field("input", f"has {len(given)} texts, but at most {_MOST_TEXTS} are allowed")
    kind = fields.text("encoding_format", "float")
    if kind not in _FORMATS:
        raise wrong_field("encoding_format", f"{shown(kind)} is none of {', '.join(_FORMATS)}")
    fields.refuse("dimensions", f"embeddings of this model have {dimensions} dimensions", dimensions)
    fields.text("user", longest=512)  # a label, which the answer does not depend on
    fields.end()
    texts = tuple(tuple(tokenizer.encode(one) if isinstance(one, str) else one) for one in given)
    for index, text in enumerate(texts):
        _check_text(text, f"input[{index}]" if len(texts) > 1 else "input", limits)
    return EmbeddingJob(texts, kind == "base64", adapter)


def _check_text(text: Sequence[int], param: str, limits: Limits) -> None:
    if not text:
        raise wrong_field(param, "has no token")
    wrong = next((token for token in text if not 0 <= token < limits.vocab_size), None)
    if wrong is not None:
        raise wrong_field(param, f"token id {shown(wrong)} is not in the vocabulary of {limits.vocab_size}")
    if len(text) > limits.longest_text:
        message = f"has {len(text)} tokens, but the context has room for {limits.longest_text}"
        raise wrong_field(param, message, "context_length_exceeded")


def embeddings_answer(
    job: EmbeddingJob, vectors: Sequence[Float[np.ndarray, " D"]], model: str, fingerprint: str
) -> dict[str, Any]:
    """Return the JSON of an answer; base64 is of little-endian float32."""
    written = [
        base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii") if job.is_base64 else vector.tolist()
        for vector in vectors
    ]
    return {
        "object": "list",
        "data": [{"object": "embedding", "index": index, "embedding": one} for index, one in enumerate(written)],
        "model": model,
        "system_fingerprint": fingerprint,
        "usage": {"prompt_tokens": job.num_tokens, "total_tokens": job.num_tokens},
    }
