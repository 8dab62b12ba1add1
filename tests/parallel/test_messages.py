"""Messages between processes arrive whole and in order, and what all have received is kept no longer."""

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from jaxinfer.parallel import messages
from jaxinfer.parallel.host_parts import HostParts, along
from jaxinfer.parallel.messages import Receiver, Sender


class Service(dict):
    """JAX's coordination service as one process sees it, which waits for nothing."""

    def key_value_set_bytes(self, key, value):
        assert key not in self
        assert len(value) <= 1 << 20 | 4
        self[key] = value

    def blocking_key_value_get_bytes(self, key, wait_ms):
        if key not in self:
            raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: it is not there")
        return self[key]

    def key_value_delete(self, folder):
        for key in [key for key in self if key.startswith(folder)]:
            del self[key]


@pytest.fixture
def service(monkeypatch):
    made = Service()
    monkeypatch.setattr(messages, "_service", lambda: made)
    return made


def test_messages_arrive_in_order_and_are_forgotten_once_all_have_them(service):
    sender, receiver = Sender("engine", [0]), Receiver("engine")
    for number in range(1200):
        sender.send(("say", number))
        assert receiver.receive(1.0) == ("say", number)
    assert len(service) < 3 * 257


def test_whoever_is_hundreds_of_messages_behind_is_waited_for(service):
    sender = Sender("engine", [0])
    for number in range(512):
        sender.send(number)
    # The service of this test does not wait.
    with pytest.raises(jax.errors.JaxRuntimeError, match="DEADLINE"):
        sender.send(512)


def test_a_message_of_many_bytes_arrives_whole(service):
    content = np.random.default_rng(0).bytes(3 << 20)
    Sender("engine", [0]).send(content)
    assert Receiver("engine").receive(1.0) == content
    assert len(service) == 4


def test_no_message_is_a_timeout(service):
    with pytest.raises(TimeoutError, match="no message"):
        Receiver("engine").receive(0.1)


def test_parts_of_an_array_change_their_length_and_come_back():
    (device, *_) = jax.devices()
    whole = np.arange(24.0).reshape(2, 3, 4)
    parts = HostParts((2, 3, 4), SingleDeviceSharding(device), (device,), (whole,))
    longer = along(1, lambda part: np.pad(part, ((0, 0), (0, 2), (0, 0))), parts)
    shorter = along(1, lambda part: part[:, :2], longer)
    assert (longer.shape, shorter.shape) == ((2, 5, 4), (2, 2, 4))
    np.testing.assert_array_equal(np.asarray(shorter.on_devices()), whole[:, :2])
