"""Random programs ask whether torch's generator is left as found, which is promised where no other thread may draw."""

import threading
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def alone() -> Iterator[None]:
    """Threads that tests of other rooms left in this process wait, and draw nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading, "active_count", lambda: 1)
        yield
