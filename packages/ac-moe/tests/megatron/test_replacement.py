import copy
import pickle
from typing import Any

import pytest

from ac_moe.megatron.replacement import Replacement, check_removable, remove_replacements


class Machine:
    def __init__(self) -> None:
        self.count = 0

    def go(self, by: int) -> int:
        self.count += by
        return self.count


class Twice(Replacement):
    def __init__(self, owner: Any) -> None:
        super().__init__(owner, "go")

    def __call__(self, by: int) -> int:
        return self.original(2 * by)


def test_installed_and_removed() -> None:
    machine, other = Machine(), Machine()
    before = dict(vars(machine))
    Twice(machine).install()
    assert (machine.go(1), other.go(1)) == (2, 1)
    remove_replacements(machine)
    assert (vars(machine) | {"count": 0}, machine.go(1)) == (before, 3)
    remove_replacements(machine)  # nothing there


def test_what_stood_there_is_called_and_put_back() -> None:
    machine = Machine()
    machine.go = own = lambda by: -by
    Twice(machine).install()
    assert machine.go(1) == -2
    remove_replacements(machine)
    assert machine.go is own


def test_several_are_removed_in_order() -> None:
    machine = Machine()
    Twice(machine).install()
    Twice(machine).install()
    assert machine.go(1) == 4
    remove_replacements(machine)
    assert machine.go(1) == 5


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda thing: pickle.loads(pickle.dumps(thing))])
def test_a_copy_has_its_own(copied: Any) -> None:
    machine = Machine()
    Twice(machine).install()
    other = copied(machine)
    assert (other.go(1), machine.count) == (2, 0)
    remove_replacements(other)
    assert (other.go(1), machine.go(1)) == (3, 2)


def test_another_in_its_place_is_told() -> None:
    machine = Machine()
    Twice(machine).install()
    ours = machine.go
    machine.go = print
    with pytest.raises(RuntimeError, match=r"Machine.go was replaced after .*enable, by <built-in .*print"):
        check_removable(machine)
    machine.go = ours
    check_removable(machine)
