"""Ranks whose cards are not alike make one plan, for the smallest of them."""

import json
from dataclasses import replace

from ac_recipes.analysis.planning import make_plan
from ac_recipes.analysis.policies import budget_policy

UNLIKE = """
import json, os
from dataclasses import replace
from pathlib import Path
import ac_core.planning.planner
import ac_recipes.analysis.planning as planning
import ac_recipes.parallel.setup as setup

rank = int(os.environ["RANK"])
ac_core.planning.planner._available = lambda: FREE[rank]
make, apply = planning.make_plan, setup.apply_activation_checkpointing

def plan_elsewhere(*arguments, **settings):
    plan = make(*arguments, **settings)
    return plan if rank == 0 else replace(plan, blocks=dict.fromkeys(plan.blocks, "full"))

def tell(model, config, **options):
    Path(FOLDER, f"applied{rank}.json").write_text(json.dumps(config.plan))
    return apply(model, config, **options)

planning.check_device = lambda *_: None  # the cards are not really there
planning.make_plan, setup.apply_activation_checkpointing = plan_elsewhere, tell
"""


def test_the_smallest_card_decides_and_all_ranks_do_what_rank_0_planned(short, train_on_ranks, tmp_path):
    recipe = short("dataset.sequence_length=64", "step_scheduler.max_steps=1")
    sized = replace(recipe, distributed=replace(recipe.distributed, dp_size=2))

    def planned(budget):
        return make_plan(sized, budget_policy(sized.distributed.checkpointing, budget), device="cpu")

    none = planned(0.99).none_peak_bytes
    least = int(none * 0.93)
    expected = planned(least).blocks
    assert len(set(expected.values())) > 1, "a plan that is told from one of another budget, and from 'full'"
    prelude = f"FREE, FOLDER = {[none * 2, least]!r}, {str(tmp_path)!r}\n{UNLIKE}"
    asked = "distributed.activation_checkpointing={policy: budget, memory_budget: device}"
    train_on_ranks(2, short("dataset.sequence_length=64", "step_scheduler.max_steps=1", asked), prelude=prelude)
    for rank in (0, 1):
        assert (tmp_path / f"applied{rank}.json").read_text() == json.dumps(expected)
