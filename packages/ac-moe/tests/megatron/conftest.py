import importlib.util

import pytest
from ac_moe_megatron import on_megatron
from ac_moe_ranks import Ranks

# Megatron-core is a dependency, but where it cannot be installed the rest can still be tested. It is looked for and not
# imported: the rank processes import it, after they have put the reference in the place of DeepEP.
collect_ignore_glob = [] if importlib.util.find_spec("megatron.core") else ["test_*.py"]


@pytest.fixture
def ranks(ranks: Ranks) -> Ranks:
    """The pool of all tests, with Megatron imported: on a busy machine that takes longer than a test may."""
    ranks.run(on_megatron, timeout=240)
    return ranks
