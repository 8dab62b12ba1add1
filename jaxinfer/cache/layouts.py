"""The cache layouts that a user can choose, such as ``dense`` or ``streaming:sinks=4,window=1020``."""

from dataclasses import dataclass, fields

from jaxinfer.errors import InvalidOption


@dataclass(frozen=True)
class DenseLayout:
    """Keeps every token; layers with a window keep the tokens in their window."""


@dataclass(frozen=True)
class PagedLayout:
    """Keeps every token, in pages of ``page`` slots; layers with a window keep all tokens too."""

    page: int = 64

    def __post_init__(self) -> None:
        page = self.page
        if isinstance(page, bool) or not isinstance(page, int) or page < 8 or page & (page - 1):
            raise InvalidOption(f"cache paged: page={page!r} is not a power of two of 8 or more")


@dataclass(frozen=True)
class StreamingLayout:
    """Keeps the first ``sinks`` tokens and the last ``window`` ones (StreamingLLM); sequences have no length limit."""

    sinks: int = 4
    window: int = 512

    def __post_init__(self) -> None:
        for name, least in (("sinks", 0), ("window", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InvalidOption(f"cache streaming: {name}={value!r} is not a whole number of {least} or more")


@dataclass(frozen=True)
class RetrievalLayout:
    """Keeps every token; a query reads ``budget`` tokens in the chunks that suit it best, and the last ``recent``."""

    budget: int = 256
    chunk: int = 16
    recent: int = 64

    def __post_init__(self) -> None:
        for name in ("budget", "chunk", "recent"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InvalidOption(f"cache retrieval: {name}={value!r} is not a whole number of 1 or more")
        if self.budget % self.chunk:
            raise InvalidOption(
                f"cache retrieval: budget={self.budget} is not a multiple of chunk={self.chunk}: it is of whole chunks"
            )


@dataclass(frozen=True)
class CropLayout:
    """Keeps a block of the text that fits learned positions; texts have no length limit.

    Each time a block is full, the last ``keep`` tokens are prefilled again (0: half of the context). ``keep`` of the
    whole context is nanoGPT's way: a prefill for every token.
    """

    keep: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.keep, bool) or not isinstance(self.keep, int) or self.keep < 0:
            raise InvalidOption(f"cache crop: keep={self.keep!r} is not a whole number of 0 or more")

    def kept(self, context: int) -> int:
        """Return how many tokens of a full block the next one begins with."""
        return self.keep or max(1, context // 2)


CacheLayout = DenseLayout | PagedLayout | StreamingLayout | RetrievalLayout | CropLayout

DENSE = DenseLayout()
_KINDS = (
    ("dense", DenseLayout),
    ("paged", PagedLayout),
    ("streaming", StreamingLayout),
    ("retrieval", RetrievalLayout),
    ("crop", CropLayout),
)


def parse_layout(spec: str | CacheLayout) -> CacheLayout:
    """Return the layout of a specification; a layout is returned unchanged."""
    if isinstance(spec, CacheLayout):
        return spec
    if not isinstance(spec, str):
        raise InvalidOption(f"cache {spec!r} is neither a text, such as 'dense', nor a cache layout")
    name, _, options = spec.partition(":")
    kind = dict(_KINDS).get(name)
    if kind is None:
        raise InvalidOption(f"unknown cache {name!r}; use {', '.join(name for name, _ in _KINDS)}")
    known = [field.name for field in fields(kind)]
    values: dict[str, int] = {}
    for option in filter(None, options.split(",")):
        key, _, text = option.partition("=")
        if key not in known:
            raise InvalidOption(
                f"unknown option {key!r} of cache {name}; its options are: {', '.join(known) or 'none'}"
            )
        if not (text.isdecimal() and len(text) < 10):
            raise InvalidOption(f"cache {name}: {key}={text!r} is not a whole number")
        values[key] = int(text)
    return kind(**values)
