"""On meshes of several devices models write what they write on one: four devices, and eight in the wide run."""

import pytest

from tests.parallel.devices import run_on_devices


def test_on_four_devices():
    run_on_devices(4, "not slow and not exhaustive")


@pytest.mark.slow
def test_on_eight_devices():
    run_on_devices(8, "slow")


@pytest.mark.exhaustive
@pytest.mark.timeout(0)
def test_all_on_eight_devices():
    run_on_devices(8, "exhaustive", timeout=None)
