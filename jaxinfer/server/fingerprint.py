"""What decides an answer besides the request."""

from jaxinfer import __version__
from jaxinfer.language_model import LanguageModel


def system_fingerprint(lm: LanguageModel) -> str:
    """Return the version, the dtype and the weights, as answers and logs name them."""
    return f"jaxinfer-{__version__}-{lm.backend.param_dtype}-{lm.fingerprint}"
