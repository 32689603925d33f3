from dataclasses import replace

import pytest

from tools.bench_moe.settings import SHAPES, Settings


def test_a_down_projection_is_counted_by_the_formula_of_the_documentation():
    shape = replace(SHAPES["cpu"], tokens=10, hidden=16, intermediate=32, top_k=3)
    assert shape.projection_flops == 10 * 2 * 16 * 32 * 3


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"experts": 7, "top_k": 1}, "experts: 7 cannot be shared equally by 2 ranks"),
        ({"top_k": 9}, "top_k: 9 is more than the 8 experts"),
        ({"layers": 0}, "layers: 0 is not a positive integer"),
        ({"hidden": 18}, "hidden: 18 is not a multiple of 4"),
        ({"intermediate": 20, "dtype": "bfloat16"}, "intermediate: 20 is not a multiple of 8"),
        ({"rounds": 4}, "rounds: 4 is less than 5"),
        ({"ranks": 0}, "ranks: 0"),
        ({"dispatchers": ("ring",)}, "dispatchers: 'ring' is not one of 'alltoall', 'hybridep'"),
        ({"buffer": "deep_ep"}, "buffer: deep_ep, whose kernels need --device cuda"),
    ],
)
def test_what_does_not_fit_is_refused(changed: dict, says: str):
    sizes = {name: value for name, value in changed.items() if hasattr(SHAPES["cpu"], name)}
    others = {name: value for name, value in changed.items() if name not in sizes}
    with pytest.raises(ValueError, match=says):
        Settings(shape=replace(SHAPES["cpu"], **sizes), **others)
