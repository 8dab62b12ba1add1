"""Which models can have texts without end, and which of their layers can use a streaming cache."""

from jaxinfer.cache.layouts import CacheLayout, CropLayout, RetrievalLayout, StreamingLayout
from jaxinfer.errors import InvalidOption
from jaxinfer.models.config import DecoderConfig, LayerKind


def streams(kind: LayerKind, layout: CacheLayout) -> bool:
    """Tell whether layers of this kind get a streaming cache; layers with a smaller window keep their own cache."""
    if not isinstance(layout, StreamingLayout):
        return False
    return kind.window is None or kind.window >= layout.sinks + layout.window


def is_endless(layout: CacheLayout) -> bool:
    """Tell whether a sequence may be longer than the model's positions."""
    return isinstance(layout, StreamingLayout | CropLayout)


def check_layout(config: DecoderConfig, layout: CacheLayout) -> None:
    """Raise an error for a layout that the model's positions do not allow."""
    if isinstance(layout, CropLayout):
        _check_crop(config, layout)
    if isinstance(layout, RetrievalLayout) and config.attention_sinks:
        raise InvalidOption(
            f"cache retrieval: {config.family} has learned attention sinks, which each query's own choice has no place "
            "for yet: use the dense cache"
        )
    if not isinstance(layout, StreamingLayout):
        return
    if config.learned_positions is not None:
        raise InvalidOption(
            f"cache streaming: {config.family} has learned positions, which end with its context: use the dense cache, "
            "or crop"
        )
    if config.sinusoids is not None:
        raise InvalidOption(
            f"cache streaming: embeddings of {config.family} hold their positions (sinusoids), which cannot be moved "
            "later: use the dense cache"
        )
    if config.alibi is not None:
        raise InvalidOption(
            f"cache streaming: keys of {config.family} hold their positions (ALiBi), which cannot be moved then: "
            "use the dense cache"
        )
    if config.norm_after_rotation:
        raise InvalidOption(
            f"cache streaming: {config.family} norms keys after their rotation, which cannot be changed then: use the "
            "dense cache"
        )
    held, known = layout.sinks + layout.window, config.longest_text
    for kind in config.kinds:
        if kind.sharpening is not None:
            raise InvalidOption(
                f"cache streaming: {config.family} multiplies queries by their place in the text, which would have no "
                "end: use the dense cache"
            )
        if kind.chunked and streams(kind, layout):
            raise InvalidOption(
                f"cache streaming: layers of {config.family} attend in chunks of {kind.window} tokens: choose sinks + "
                f"window above {kind.window}"
            )
        scaling = None if kind.rope is None else kind.rope.scaling
        if scaling is not None and scaling.kind in ("dynamic", "longrope"):
            # Such a model changes its rotations with the sequence's length past the original one.
            if not streams(kind, layout):
                raise InvalidOption(
                    f"cache streaming: the {scaling.kind} positions of layers that see {kind.window} tokens depend on "
                    f"the text's length: choose sinks + window of at most {kind.window}"
                )
            known = min(scaling.original_max_position, known or scaling.original_max_position)
    if known is not None and held > known:
        raise InvalidOption(
            f"cache streaming: sinks={layout.sinks} and window={layout.window} hold {held} tokens, but the model's "
            f"positions reach {known}: choose a smaller window"
        )


def _check_crop(config: DecoderConfig, layout: CropLayout) -> None:
    if config.learned_positions is None:
        raise InvalidOption(
            f"cache crop: {config.family} has no learned positions that end: use the dense cache, or streaming where "
            "its positions allow texts without end"
        )
    if layout.keep > config.max_position:
        raise InvalidOption(
            f"cache crop: keep={layout.keep} is more than the context of {config.max_position}: choose a smaller keep"
        )
