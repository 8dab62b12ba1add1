"""Faults of what strategies are given and told: nodes of sums, their answers, and the tree option of drafters."""

from tests.mutants.fault import Fault

_VIEW, _SEEN = "jaxinfer/decoding/drafting/part_view.py", "tests/decoding/drafting/test_part_view.py"
_TREE = "jaxinfer/decoding/drafting/tree_drafter.py"
_BOUNDED = "tests/decoding/strategies/test_medusa.py::test_a_bounded_sum_asks_for_no_drafts_that_it_would_hardly_take"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "a part of a sum sees the sum's numbering",
        _VIEW,
        "take_rows(values_BMX, at_BM)",
        "values_BMX[:, : at_BM.shape[1]]",
        _SEEN,
    ),
    Fault(
        "a learning part is given the sum's answers",
        "jaxinfer/decoding/strategies/sum_of_drafters.py",
        "view.proposal, view.verified, view.draws_BM",
        "view.proposal, verified, view.draws_BM",
        "tests/decoding/test_readme.py",
    ),
    Fault(
        "nodes that a sum left out look verified",
        _VIEW,
        "draft.tree.valid_BM & (places_BM >= 0)",
        "draft.tree.valid_BM",
        _SEEN,
    ),
    Fault(
        "nodes that a sum left out keep tokens that were not answered",
        _VIEW,
        "_replace(tokens_BM=tokens_BM, valid_BM=valid_BM)",
        "_replace(valid_BM=valid_BM)",
        _SEEN,
    ),
    Fault(
        "a part's path has nodes that a sum left out",
        _VIEW,
        "is_taken_BM = valid_BM & is_on_path_BM",
        "is_taken_BM = is_on_path_BM",
        _SEEN,
    ),
    Fault(
        "the last node is the root",
        "jaxinfer/decoding/step.py",
        "last_B1 = jnp.take_along_axis(walk.path_BM, walk.taken_B[:, None] - 1, axis=1)",
        "last_B1 = jnp.take_along_axis(walk.path_BM, walk.taken_B[:, None] * 0, axis=1)",
        _SEEN,
    ),
    Fault(
        "parts get what another's forward left",
        _VIEW,
        "verified.aux) if verifies else None",
        "verified.aux)",
        _SEEN,
    ),
    Fault(
        "a tree that nobody named ignores the device's and the sum's bound",
        _TREE,
        "paths_for(paths, self.sum_nodes or most, self.sum_nodes > 0)",
        "paths",
        _BOUNDED,
    ),
    Fault(
        "tree=own is cut to the device's bound",
        _TREE,
        "if self.tree or (beside",
        "if (beside",
        _BOUNDED,
    ),
)
