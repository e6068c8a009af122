"""For all tests: small machines, no way out to the hub, nothing of the user's own settings."""

import os
import signal

# Before any import of torch: its thread pools take every core, and the tests' processes share few.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# A shell that starts the tests with `&` has them ignore Ctrl-C, and all that they start too; tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)
