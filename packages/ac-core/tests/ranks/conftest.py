import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

# With --import-mode=importlib a test file cannot import its neighbours by name; the ranks could not either.
sys.path.insert(0, str(Path(__file__).parent))

from ac_core_cases import train
from ac_core_ranks import Ranks
from ac_core_training import Outcome


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Two processes with a gloo group between them, for all tests of this folder."""
    pool = Ranks(2, tmp_path_factory.mktemp("ranks"))
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def trained(ranks: Ranks) -> Callable[[str], list[dict[str, Outcome]]]:
    """What the policies did in a case, on each rank. A case is trained once."""
    return cache(lambda case: ranks.run(train, case=case))
