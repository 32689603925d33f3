import pytest

import ac_moe


def test_facade() -> None:
    assert set(ac_moe.megatron.__all__) <= set(dir(ac_moe.megatron))
    with pytest.raises(AttributeError, match="module 'ac_moe.megatron' has no attribute 'patch'"):
        _ = ac_moe.megatron.patch
