"""The deliberate faults of `tests.mutants` can be applied: their places are in the code, and enough of them."""

from tests.mutants.__main__ import all_faults, misplaced


def test_every_fault_has_its_place():
    faults = [fault for found in all_faults().values() for fault in found]
    assert misplaced(faults) == []
    assert len({fault.name for fault in faults}) == len(faults)
