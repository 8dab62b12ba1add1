"""Faults of models into which factors are folded, and of adapters of the model before."""

from tests.mutants.fault import Fault

_FOLDED, _BASIS = "jaxinfer/models/folded.py", "jaxinfer/adapter_basis.py"
_OF_FOLDED = "tests/quantization/test_folded.py"
_LIKE_BEFORE = f"{_OF_FOLDED}::test_an_adapter_changes_a_folded_model_as_the_model_before"
_IN_FOLDERS = f"{_OF_FOLDED}::test_what_was_folded_is_saved_copied_cut_and_loaded_with_any_weights"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "an adapter reads inputs that were divided as if they were not",
        _BASIS,
        "own = own._replace(down_RI=own.down_RI * inputs)",
        "pass",
        _LIKE_BEFORE,
    ),
    Fault(
        "an adapter adds to outputs that were divided as if they were not",
        _FOLDED,
        '    "attention.value": "attention.output",\n',
        "",
        _LIKE_BEFORE,
    ),
    Fault(
        "a bias of an adapter is that of the model before",
        _BASIS,
        "own.shift_O / outputs",
        "own.shift_O",
        _LIKE_BEFORE,
    ),
    Fault(
        "a norm of an adapter is that of the model before",
        _BASIS,
        "if outputs is None:\n            return vector",
        "if True:\n            return vector",
        _LIKE_BEFORE,
    ),
    Fault(
        "a norm's weight is folded without the one beside it",
        _BASIS,
        'added = 1.0 - self.config.neutral_scale if part == "scale" else 0.0',
        "added = 0.0",
        _LIKE_BEFORE,
    ),
    Fault(
        "magnitudes are of rows that were divided",
        _BASIS,
        "kernel_OI[rows] *= outputs[:, None]",
        "pass",
        _LIKE_BEFORE,
    ),
    Fault(
        "an expert's adapter has the first one's factors",
        _BASIS,
        "each if each is None or each.ndim == 1 else each[expert]",
        "each if each is None or each.ndim == 1 else each[0]",
        f"{_OF_FOLDED}::test_an_adapter_of_routers_experts_and_shared_experts_changes_a_folded_mixture_as_it_was",
    ),
    Fault(
        "what was folded is forgotten when a model changes",
        "jaxinfer/language_model.py",
        "folded=joined(self.folded, folded),",
        "folded=None,",
        _LIKE_BEFORE,
    ),
    Fault(
        "what was folded is not written",
        "jaxinfer/checkpoint/convert.py",
        "factors = {} if folded is None or folded.factors is None else folded.factors",
        "factors = {}",
        _IN_FOLDERS,
    ),
    Fault(
        "factors of layers that are left out stay",
        "jaxinfer/checkpoint/first_layers.py",
        "folded = checkpoint.folded and checkpoint.folded.first(count)",
        "folded = checkpoint.folded",
        _IN_FOLDERS,
    ),
    Fault(
        "a folder that does not say what was folded is trusted",
        "jaxinfer/checkpoint/orbax/marker.py",
        "return None if version == _IN_FEW_BITS and rounded_from is not None else ()",
        "return ()",
        f"{_OF_FOLDED}::test_a_folder_that_does_not_say_what_was_folded_takes_no_adapter",
    ),
    Fault(
        "streams of the model before are not folded",
        "jaxinfer/decoding/strategies/streams.py",
        'params = {**params, "blocks": folded_adapters(params["blocks"], target.folded, first)}',
        "pass",
        f"{_OF_FOLDED}::test_streams_that_were_trained_on_the_model_before_are_folded",
    ),
)
