"""The policy `budget` at so many bytes held: what the other selective policies are compared at.

A budget of `ac_core.plan` is of the peak, and this is what a step holds at the end of its forward: the one station of a
course in which the backwards take nothing.
"""

from dataclasses import replace

from torch import nn

from tools.bench.shapes import Shape, build_batch
from tools.bench.variants import Unavailable, Variant

MIB = 2**20


def ours_planned(held: float, shape: Shape) -> Variant:
    """ac-core's cheapest mix that holds at most `held` MiB, counted as in the table."""

    def apply(model: nn.Module) -> None:
        import ac_core
        from ac_core.estimation.estimate import TrainingStep
        from ac_core.planning.course import Course
        from ac_core.planning.measuring import Bench, measured

        batch = build_batch(shape)
        step = TrainingStep(model=model, batch=batch, dtype=None, optimizer="none", keep_output=True, device="cpu")
        course, plain = measured(Bench(step.simulate, ac_core.ActivationCheckpointingConfig()))
        outside = plain.end - sum(plain.log.before.values()) - course.totals(dict.fromkeys(course.order, "none"))[0]
        kept_alone = {
            name: {option: replace(figures, working=0) for option, figures in options.items()}
            for name, options in course.options.items()
        }
        nowhere = dict.fromkeys(course.order, 0)
        at_end = [*nowhere.values(), outside]
        plan = Course(course.order, kept_alone, course.exchange, beside=nowhere, between=at_end).solve(held * MIB)
        if plan is None:
            raise Unavailable(f"no mix holds only {held:g} MiB; outside of the blocks there are {outside} bytes")
        ac_core.apply_activation_checkpointing(model, ac_core.ActivationCheckpointingConfig(policy="budget", plan=plan))

    return Variant("ours", "selective", apply, f"planned for {held:g} MiB")
