"""Faults of rows split over the devices that have the experts: where they are, what is sent, and what is counted."""

from tests.mutants.fault import Fault

_EXCHANGE, _EXPERTS = "jaxinfer/ops/token_exchange.py", "jaxinfer/ops/experts.py"
_COLLECTIVES = "jaxinfer/planning/hlo/collectives.py"
_ON_DEVICES = "tests/parallel/on_devices/test_token_exchange.py"
_BITS = f"{_ON_DEVICES}::test_either_exchange_returns_the_bits_of_a_mesh_without_the_axis"
_TOLD = f"{_ON_DEVICES}::test_a_tpu_is_told_where_rows_begin_and_land_and_how_many_they_are"
_BYTES = f"{_ON_DEVICES}::test_shares_of_sums_in_bytes_are_those_of_all_that_get_the_sums"
_RULES = "tests/parallel/test_rules.py::test_the_devices_that_have_the_experts_split_rows_where_they_divide"
_COUNTED = "tests/planning/test_experts.py::test_devices_that_split_the_rows_hold_their_cache_and_exchange_tokens"
_HLO = "tests/planning/hlo/test_collectives.py"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "rows of all devices land in the same place",
        _EXCHANGE,
        "land_SE = before_SE + (",
        "land_SE = 0 * before_SE + (",
        _BITS,
    ),
    Fault(
        "an expert's rows land where the first expert's blocks begin",
        _EXCHANGE,
        "((ends_DE - blocks_DE) * rows).reshape(-1)",
        "((ends_DE - blocks_DE) * 0).reshape(-1)",
        _BITS,
    ),
    Fault(
        "what comes back is taken from where it began on its sender",
        _EXCHANGE,
        "there = Chunks(routes.received.land,",
        "there = Chunks(routes.received.begin,",
        _BITS,
    ),
    Fault(
        "a TPU is told to expect as many rows as it sends",
        _EXCHANGE,
        "sent.land, received.sizes, axis_name=axis",
        "sent.land, sent.sizes, axis_name=axis",
        _TOLD,
    ),
    Fault(
        "a TPU is told that rows land where they begin",
        _EXCHANGE,
        "sent.begin, sent.sizes, sent.land, received",
        "sent.begin, sent.sizes, sent.begin, received",
        _TOLD,
    ),
    Fault(
        "a few tokens go to their experts one by one",
        _EXCHANGE,
        "gathered - by_copies >= _PAYS",
        "gathered - by_copies >= 0",
        _COUNTED,
    ),
    Fault(
        "many tokens are gathered",
        _EXCHANGE,
        "by_copies = rows * per_token / devices",
        "by_copies = rows * per_token",
        _COUNTED,
    ),
    Fault(
        "CPU devices add up sums, in another order than one device",
        _EXPERTS,
        'self.backend.platform == "cpu" and is_exact',
        'self.backend.platform == "gpu" and is_exact',
        _BITS,
    ),
    Fault(
        "a share of sums in bytes is not rounded as the others are",
        "jaxinfer/ops/quantized_sums.py",
        "_widened(*_rounded(share)).reshape(-1, *row)",
        "share.reshape(-1, *row)",
        _BYTES,
    ),
    Fault(
        "a share of a few rows is of the other devices' numbers",
        "jaxinfer/ops/quantized_sums.py",
        "parts.reshape(devices, -1, _LANES), axis)",
        "parts.reshape(-1, devices, _LANES).swapaxes(0, 1), axis)",
        _BYTES,
    ),
    Fault(
        "rows are split over experts' devices beside stages too",
        "jaxinfer/ops/logical_axes.py",
        "stages == ring == 1",
        "ring == 1",
        _RULES,
    ),
    Fault(
        "rows are split where experts' devices alone divide them",
        "jaxinfer/ops/logical_axes.py",
        "count % further == 0",
        "count % (further // data) == 0",
        _RULES,
    ),
    Fault(
        "a cache is split by its layers' number",
        "jaxinfer/parallel/rules.py",
        "rows = split_rows(leaf.shape[1], mesh)",
        "rows = split_rows(leaf.shape[0], mesh)",
        _RULES,
    ),
    Fault(
        "a drafter beside pages splits rows that its target does not",
        "jaxinfer/engine/assembly.py",
        "    if not isinstance(node, Strategy):",
        "    if isinstance(node, Strategy):",
        "tests/engine/test_assembly.py",
    ),
    Fault(
        "a collective counts again where it goes on",
        "jaxinfer/planning/hlo/walk.py",
        "            if is_repeated(begun, computation, line):",
        "            if not begun and is_repeated(begun, computation, line):",
        f"{_HLO}::test_a_gather_that_goes_on_beside_products_is_one",
    ),
    Fault(
        "room for rows is sent",
        _COLLECTIVES,
        "results=min(taken, filled,",
        "results=max(taken, filled,",
        f"{_HLO}::test_of_a_ragged_exchange_rows_count_that_there_are",
    ),
    Fault(
        "experts multiply one device's tokens in an estimate",
        "jaxinfer/planning/footprint.py",
        "(sharing - 1) * 2 * footprint.expert_weights",
        "(sharing - 1) * 0 * footprint.expert_weights",
        _COUNTED,
    ),
    Fault(
        "sums that are not sent in bytes are counted so",
        _EXCHANGE,
        'backend.collectives == "int8" and splits_into_blocks(model_dim, devices)',
        'backend.collectives == "int8"',
        "tests/planning/test_experts.py::test_sums_that_are_not_sent_in_bytes_are_not_counted_so",
    ),
    Fault(
        "a plan forgets the scales of sums in bytes",
        "jaxinfer/ops/quantized_sums.py",
        "return numbers, numbers // _BLOCK * 4",
        "return numbers, 0",
        "tests/planning/test_experts.py::test_sums_in_bytes_are_two_exchanges_of_codes_and_scales",
    ),
    Fault(
        "a batch is filled up for data alone",
        "jaxinfer/ops/logical_axes.py",
        "devices = further if at_least > further else data",
        "devices = data",
        "tests/parallel/test_rules.py::test_a_batch_is_filled_up_until_the_devices_that_may_split_it_do",
    ),
    Fault(
        "a plan counts the rows that were asked for",
        "jaxinfer/planning/deployment.py",
        "return filled_rows(self.batch, self.mesh.abstract)",
        "return self.batch",
        "tests/planning/test_experts.py::test_rows_that_fill_a_batch_up_are_counted",
    ),
)
