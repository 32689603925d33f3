import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# With --import-mode=importlib a test file cannot import its neighbours by name; the ranks' processes could not either.
sys.path.insert(0, str(Path(__file__).parent))

from ac_moe_ranks import Ranks


@pytest.fixture(scope="package", autouse=True)
def _frozen() -> Iterator[None]:
    """Modules are no garbage: a test that collects need not look through all their objects, which takes 0.2 s."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Two processes with an initialised gloo group, shared by the tests and replaced after a failure."""
    pool = Ranks(2, tmp_path_factory.mktemp("ranks"))
    yield pool
    pool.close()
