"""Faults of multi-token prediction: what its layers read, in which form, and how far behind they are."""

from tests.mutants.fault import Fault

FAULTS: tuple[Fault, ...] = (
    Fault(
        "an MTP layer reads hidden states that the final norm has not seen",
        "jaxinfer/decoding/strategies/mtp.py",
        "hidden_BTD = self.layer.model.normed(self.state.cache.features.read(positions_BT, (self.feature,)))",
        "hidden_BTD = self.state.cache.features.read(positions_BT, (self.feature,))",
        "tests/decoding/strategies/test_mtp.py::test_drafts_are_those_of_transformers_blocks[mimo]",
    ),
    Fault(
        "an MTP layer sees the embedding beside the first hidden state",
        "jaxinfer/models/drafters/mtp.py",
        "jnp.where(positions_BT[..., None] == 0, 0, embedded_BTD)",
        "jnp.where(positions_BT[..., None] < 0, 0, embedded_BTD)",
        "tests/decoding/strategies/test_mtp.py::test_drafts_are_those_of_transformers_blocks[mimo]",
    ),
    Fault(
        "an MTP layer catches up on the current token alone",
        "jaxinfer/decoding/strategies/mtp.py",
        "return max(self.catch_up, self.num_draft_tokens + 1)",
        "return max(self.catch_up, 1)",
        "tests/decoding/strategies/test_mtp.py::test_drafts_are_those_of_transformers_blocks[mimo]",
    ),
    Fault(
        "GLM's layer reads the hidden state first",
        "jaxinfer/models/drafters/mtp.py",
        "MtpForm(True, False), MtpForm(False, True)",
        "MtpForm(False, False), MtpForm(False, True)",
        "tests/decoding/strategies/test_mtp.py::test_drafts_are_those_of_transformers_blocks[glm]",
    ),
)
