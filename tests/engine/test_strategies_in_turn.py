"""Several strategies in turn on one model: programs of pages and rows are those of what each strategy keeps there."""

import jaxinfer
from tests.cache.test_features import ReadingLookup

# All but one are refilled into rows, and share a page that each continues in a copy.
PROMPTS = ["The quick fox"] * 5


def test_pools_with_and_without_features(tiny_llama_folder):
    lm = jaxinfer.load(tiny_llama_folder())
    texts = [
        [result.tokens for result in lm.generate(PROMPTS, batch_size=2, max_new_tokens=8, strategy=strategy)]
        for strategy in (ReadingLookup(), "autoregressive", ReadingLookup())
    ]
    assert texts[0] == texts[1] == texts[2]


def test_beams_of_several_widths(tiny_llama_folder):
    lm = jaxinfer.load(tiny_llama_folder())
    prompts = [f"The quick fox {number}" for number in range(5)]
    for strategy, rows in (("beam:width=2", 4), ("beam:width=3", 6), ("beam:width=2", 4)):
        found = lm.generate(prompts, batch_size=rows, max_new_tokens=6, strategy=strategy)
        (alone,) = lm.generate(prompts[3], max_new_tokens=6, strategy=strategy)
        assert found[3].tokens == alone.tokens
