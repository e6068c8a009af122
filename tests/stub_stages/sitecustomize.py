"""With this folder on PYTHONPATH a Python process runs the flow with stub stages."""

import stub_stages

stub_stages.install()
