"""These tests need eight devices from the start of their process; `tests.parallel.test_on_eight_devices` runs them."""

import os

collect_ignore_glob = [] if "device_count=8" in os.environ.get("XLA_FLAGS", "") else ["test_*.py"]
