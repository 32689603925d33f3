"""Which examples are held out for validation."""

from ac_recipes.errors import UsageError


def places_to_hold_out(count: int, fraction: float, unit: str) -> tuple[list[int], list[int]]:
    """Of `count` examples, the places of those to train on and of those to hold out, a `fraction`, in order.

    Evenly spaced, rather than the last ones: both sides then see every kind of example. `unit` is what they are called.

    Raises:
        UsageError: nothing is left to train on.
    """
    held_out = round(count * fraction)
    if held_out >= count:
        raise UsageError(f"dataset.validation_fraction: of {count} {unit} none is left to train on")
    chosen = [(i + 1) * count // held_out - 1 for i in range(held_out)]
    return sorted(set(range(count)).difference(chosen)), chosen
