"""Makes what the scheduler sees of a prompt: a sequence for each of its samples, or one beam search for all of them."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxinfer.decoding.strategy import Strategy
from jaxinfer.engine.output import SequenceOutput
from jaxinfer.engine.request import EngineRequest
from jaxinfer.engine.sequence import EngineSequence
from jaxinfer.results import StreamPiece
from jaxinfer.text_generation import TextRequest, start_row
from jaxinfer.tokenizers import Tokenizer


def sequences_of(
    strategy: Strategy,
    texts: Sequence[TextRequest],
    request: EngineRequest,
    numbers: Iterator[int],
    *,
    eos_token_ids: Sequence[int],
    tokenizer: Tokenizer | None,
    now: float,
    shares_prompt: bool = True,
    callback: Callable[[StreamPiece], None] | None = None,
    compile_seconds: Callable[[], float] = lambda: 0.0,
    **of_each: Any,
) -> list[EngineSequence]:
    """Return the sequences of one prompt, whose samples ``texts`` are; ``of_each`` are other fields that they have.

    The first sample's pieces go to the ``callback``. Where the prompt can be shared, others wait until it is computed.
    """

    def output(text: TextRequest) -> SequenceOutput:
        first_only = callback if text.request.sample == 0 else None
        row = start_row(text, eos_token_ids, tokenizer)
        return SequenceOutput(request, row, strategy.max_depth, now, first_only, compile_seconds)

    def fields(text: TextRequest) -> dict[str, Any]:
        asked = text.request
        own = {"tokens": list(asked.prompt), "max_length": asked.max_length, "adapter": asked.adapter}
        return {"number": next(numbers), "arrival": now, **own, **of_each}

    if strategy.rows_per_prompt is not None:
        # Imported here: other strategies need nothing of it.
        from jaxinfer.engine.beam_output import BeamOutput
        from jaxinfer.engine.beam_sequence import BeamSequence

        origin = BeamOutput([output(text) for text in texts])
        return [BeamSequence(**fields(texts[0]), origin=origin, width=strategy.rows_per_prompt)]
    sequences: list[EngineSequence] = []
    for text in texts:
        leader = sequences[0] if sequences and shares_prompt else None
        sequences.append(EngineSequence(**fields(text), origin=output(text), leader=leader))
    return sequences
