"""What decides an answer besides the request."""

from jaxinfer import __version__
from jaxinfer.language_model import LanguageModel


def system_fingerprint(lm: LanguageModel, adapter: str | None = None) -> str:
    """Return the version, the dtype, what is rounded or left out, the weights and an adapter's, as answers do."""
    backend, sparsity = lm.backend, lm.backend.sparsity
    changed = {
        "activations": backend.activations,
        "cache": None if backend.cache_dtype in (backend.param_dtype, backend.compute_dtype) else backend.cache_dtype,
        "collectives": backend.collectives,
        # What is exact decides nothing.
        "sparsity": None if sparsity is None or sparsity.kind == "exact" else sparsity.name,
    }
    parts = [f"jaxinfer-{__version__}", backend.param_dtype]
    parts += [f"{what}_{how}" for what, how in changed.items() if how is not None]
    parts += [lm.fingerprint, *([] if adapter is None else [lm.loaded_adapters.fingerprint(adapter)])]
    return "-".join(parts)
