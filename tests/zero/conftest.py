"""Where DeepSpeed does not start, its tests are skipped, and say why."""

import pytest

from support.starting import why_deepspeed_does_not_start


@pytest.fixture(scope="session", autouse=True)
def deepspeed_starts() -> None:
    """Skip every test, unless DeepSpeed can be imported and starts a group."""
    reason = why_deepspeed_does_not_start()
    if reason is not None:
        pytest.skip(f"DeepSpeed does not start here: {reason}")
