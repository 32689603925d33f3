import copy
import gc
import weakref

from torch import nn

from ac_moe.routing.sites import site_of


def test_one_site_for_each_module() -> None:
    layer, other = nn.Linear(2, 2), nn.Linear(2, 2)
    assert site_of(layer, "layers.0.router") is site_of(layer)
    assert str(site_of(layer)) == "layers.0.router"
    assert site_of(other) is not site_of(layer) is not site_of(copy.deepcopy(layer))
    assert str(site_of(other)).startswith("Linear #")


def test_a_site_goes_with_its_module() -> None:
    layer = nn.Linear(2, 2)
    site = weakref.ref(site_of(layer))
    assert site() is not None
    del layer
    gc.collect()
    assert site() is None
