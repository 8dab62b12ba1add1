import dataclasses
import math

import numpy as np
import pytest

from jaxinfer.errors import InvalidOption
from jaxinfer.sampling import NO_TOKEN, SamplingParams, sampling_arrays

INVALID = [
    ("temperature", -1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", 1e-9),
    ("temperature", "hot"),
    ("temperature", True),
    ("top_k", -4),
    ("top_k", 1.5),
    ("top_k", True),
    ("top_p", 0),
    ("top_p", 2),
    ("top_p", math.nan),
    ("top_p", -0.1),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("repetition_penalty", 0),
    ("repetition_penalty", -1.0),
    ("repetition_penalty", math.inf),
    ("presence_penalty", 3.0),
    ("presence_penalty", math.nan),
    ("frequency_penalty", -2.5),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {"a": 1.0}),
    ("logit_bias", {1: math.nan}),
    ("logit_bias", {1: math.inf}),
    ("logit_bias", {1: None}),
    ("logit_bias", ((1, 2.0), (1, 3.0))),
    ("logit_bias", 5),
    ("seed", -1),
    ("seed", 2**63),
    ("seed", 1.0),
    ("seed", True),
    ("seed", None),
    ("n", 0),
    ("n", False),
    ("stop", ""),
    ("stop", ["end", ""]),
    ("stop", [7]),
    ("stop", 7),
    ("min_new_tokens", -1),
    ("ignore_eos", 1),
    ("logprobs", "yes"),
]


@pytest.mark.parametrize(("field", "value"), INVALID, ids=lambda item: repr(item))
def test_an_invalid_value_is_refused_in_one_line_that_names_the_field(field, value):
    with pytest.raises(InvalidOption) as refusal:
        SamplingParams(**{field: value})
    message = str(refusal.value)
    assert field in message
    assert "\n" not in message


def test_equal_requests_hash_alike_whatever_containers_they_came_in():
    a = SamplingParams(temperature=1, logit_bias={9: 1, 3: -2}, stop="end")
    b = SamplingParams(temperature=1.0, logit_bias=((3, -2.0), (9, 1.0)), stop=["end"])
    assert a == b
    assert hash(a) == hash(b)
    assert a.stop == ("end",)
    assert dataclasses.replace(a, seed=4).logit_bias == a.logit_bias == ((3, -2.0), (9, 1.0))


def test_numpy_numbers_are_numbers():
    params = SamplingParams(temperature=np.float32(0.5), top_k=np.int64(3), seed=np.uint32(2**32 - 1))
    assert (params.temperature, params.top_k, params.seed) == (0.5, 3, 2**32 - 1)


def test_a_bias_outside_the_vocabulary_is_refused():
    with pytest.raises(InvalidOption, match=r"token 100.*0 to 99"):
        sampling_arrays([SamplingParams(logit_bias={100: 1.0})], [0], [2], vocab_size=100)


def test_widths_are_powers_of_two_from_eight():
    few = sampling_arrays([SamplingParams(logit_bias={5: 1.0}), SamplingParams()], [0, 0], [2, 3], 100)
    many = sampling_arrays([SamplingParams(logit_bias=dict.fromkeys(range(9), 1.0))], [0], [2], 100)
    assert few.bias_ids_BX.shape == (2, 8)
    assert many.bias_ids_BX.shape == (1, 16)
    assert few.bias_ids_BX[0].tolist() == [5] + [NO_TOKEN] * 7
    assert few.stop_ids_BE[0].tolist() == [2, 3] + [NO_TOKEN] * 6


def test_ignoring_the_end_leaves_no_stop_ids():
    arrays = sampling_arrays([SamplingParams(ignore_eos=True)], [0], [2], 100)
    assert (np.asarray(arrays.stop_ids_BE) == NO_TOKEN).all()


def test_a_top_k_beyond_32_bits_does_not_wrap():
    assert sampling_arrays([SamplingParams(top_k=2**40)], [0], [2], 100).top_k_B[0] == 2**31 - 1
