"""Runs Hugging Face transformers on the same checkpoint, for comparison."""

import contextlib
import importlib.util
import inspect
import io
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxinfer.bench.latency.times import Times
from jaxinfer.errors import InvalidCheckpoint, InvalidOption

_DTYPES = ("float32", "bfloat16")


def check_rival(dtypes: Sequence[str]) -> None:
    """Raise InvalidOption if the comparison is not possible."""
    absent = [name for name in ("torch", "transformers", "accelerate") if importlib.util.find_spec(name) is None]
    if absent:
        raise InvalidOption(f"--compare transformers needs {', '.join(absent)}: pip install {' '.join(absent)}")
    for dtype in dtypes:
        if dtype not in _DTYPES:
            raise InvalidOption(f"--compare transformers runs in {' and '.join(_DTYPES)}, not in {dtype}")


def time_transformers(
    path: Path, dtype: str, prompts: Sequence[Sequence[int]], new_tokens: int, repeats: int
) -> list[Times]:
    """Return the times of warm greedy runs: one forward pass over the prompts, then one pass per token with its KV
    cache.
    """
    import torch

    model = _load(path, dtype)
    ids = torch.tensor(prompts)
    # Its name from transformers 5.24 on, and before.
    cache = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    times = []
    with torch.inference_mode():
        for _ in range(1 + repeats):
            began = time.perf_counter()
            output = model(ids, use_cache=True, logits_to_keep=1)
            token = output.logits[:, -1:].argmax(-1)
            prefilled = time.perf_counter()
            for _ in range(new_tokens - 1):
                output = model(token, use_cache=True, **{cache: output[cache]})
                token = output.logits[:, -1:].argmax(-1)
            prefill = prefilled - began
            times.append(Times(prefill, time.perf_counter() - prefilled, prefill))
    return times[1:]


def _load(path: Path, dtype: str) -> Any:
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    folder, options = (path, {}) if path.is_dir() else (path.parent, {"gguf_file": path.name})
    # No single switch turns off all of its progress bars.
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(
                str(folder), dtype=getattr(torch, dtype), local_files_only=True, **options
            )
        except (OSError, ValueError, ImportError) as error:
            raise InvalidCheckpoint(f"{path}: transformers cannot load it: {error}") from error
    return model.eval()
