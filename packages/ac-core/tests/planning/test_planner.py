"""A plan is within its budget as measured on the real model, and its step is that of no checkpointing."""

import json
from itertools import product

import pytest
import torch
from torch import nn

import ac_core
from ac_core import ActivationCheckpointingConfig, ActivationCheckpointingError, Plan
from ac_core.planning import planner
from ac_core.planning.planner import fit

SHARES = (1.0, 0.8, 0.65, 0.5)


@pytest.fixture(scope="module")
def plans(of_decoder):
    return [fit(share, *of_decoder) for share in SHARES]


def measured_under(plan, model, batch):
    ac_core.apply_activation_checkpointing(model, plan.to_config())
    usage = ac_core.measure(model, batch)
    ac_core.remove_activation_checkpointing(model)
    return usage


@pytest.mark.parametrize("index", range(len(SHARES)))
def test_it_takes_what_it_says_and_no_more_than_the_budget(plans, decoder, batch, resident, index):
    plan, model = plans[index], decoder()
    usage = measured_under(plan, model, batch)
    assert plan.peak_bytes == usage.peak_bytes + resident(model, batch) <= plan.budget_bytes
    assert plan.saved_bytes == usage.saved_bytes
    assert plan.recompute_flops == usage.recompute_flops
    assert plan.forward_flops == usage.forward_flops


@pytest.mark.parametrize("index", range(len(SHARES)))
def test_a_mix_gives_the_numbers_of_no_checkpointing(plans, decoder, batch, index):
    assert ac_core.verify(decoder(), batch, plans[index].to_config()).equal
    assert len(set(plans[2].blocks.values())) > 1


def test_memory_and_work_are_monotone_in_the_budget(of_decoder, plans):
    _, course, _ = of_decoder
    peaks = [plan.peak_bytes for plan in plans]
    costs = [course.totals(plan.blocks)[2] for plan in plans]
    assert peaks == sorted(peaks, reverse=True)
    assert costs == sorted(costs)
    assert costs[0] == 0 < costs[-1]


def test_with_enough_memory_nothing_is_checkpointed(plans):
    assert set(plans[0].blocks.values()) == {"none"}
    assert plans[0].peak_bytes == plans[0].none_peak_bytes == plans[0].budget_bytes


def test_where_no_plan_fits_the_smallest_peak_is_named_and_is_reached(of_decoder):
    with pytest.raises(ActivationCheckpointingError, match=r"no plan fits into 50\.00 KiB.*in the backward of") as told:
        fit("50KiB", *of_decoder)
    smallest = int(str(told.value).partition("Give at least ")[2].partition(" bytes")[0])
    assert fit(smallest, *of_decoder).peak_bytes == smallest
    with pytest.raises(ActivationCheckpointingError, match="no plan fits"):
        fit(smallest - 1, *of_decoder)


def test_a_choice_that_turns_out_too_large_is_made_again(of_decoder):
    bench, course, plain = of_decoder
    optimist = type(course)(course.order, course.options, course.exchange, dict(course.beside), list(course.between))
    optimist.beside = {name: beside - 20_000 for name, beside in course.beside.items()}
    optimist.between = [0] * len(course.between)
    limit = int(0.7 * plain.peak)
    assert bench.run(optimist.solve(limit), "full").peak > limit
    found = fit(limit, bench, optimist, plain)
    assert found.peak_bytes <= limit
    assert found.blocks == fit(limit, bench, course, plain).blocks, "calibrated, and not given up"


def test_device_is_what_the_card_has(of_decoder, monkeypatch):
    if not torch.cuda.is_available():
        with pytest.raises(ActivationCheckpointingError, match="there is none here; give a size"):
            fit("device", *of_decoder)
    _, _, plain = of_decoder
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (plain.peak - 100_000, 2 * plain.peak))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 60_000)
    plan = fit("device", *of_decoder)
    assert plan.peak_bytes <= plan.budget_bytes == plain.peak - 40_000
    assert plan.to_config().memory_budget == "device"


def test_it_is_saved_and_read_back(plans):
    plan = plans[2]
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    assert plan.to_config() == Plan.from_dict(plan.to_dict()).to_config()
    for other in ({"blocks": {}}, {**plan.to_dict(), "curve": None}, {**plan.to_dict(), "more": 1}, {}, []):
        with pytest.raises(ValueError, match=r"^plan: .*is no plan as Plan.to_dict writes it"):
            Plan.from_dict(other)


EDITED = {
    "a list with an int": (("blocks", "layers.0"), [3], r"^plan: for 'layers.0': 3 is not a family"),
    "an unknown option": (("blocks", "layers.0"), "ful", r"^plan: 'ful' for 'layers.0' is not 'none', 'full'"),
    "a figure as text": (("peak_bytes",), "9", r"^plan: peak_bytes: '9' is no whole number"),
    "a moment that is none": (("peak_moment",), 3, r"^plan: peak_moment: 3 is no text"),
    "a figure of a block": (("per_block", "layers.0"), [1, True], r"^plan: per_block: layers.0: True is no whole"),
    "too many of a block": (("per_block", "layers.0"), [1, 2, 3], r"^plan: per_block: \[1, 2, 3\] is not two figures"),
    "a figure of the curve": (("curve", 0, "cost"), float("nan"), r"^plan: curve: 0: cost: nan is no number"),
    "a figure of a policy": (("fixed", "full", "peak_bytes"), 1.5, r"^plan: fixed: full: peak_bytes: 1.5 is no whole"),
    "format true": (("format",), True, r"^plan: it was saved by another ac-core, in format True"),
    "format 1.0": (("format",), 1.0, r"^plan: it was saved by another ac-core, in format 1.0"),
    "a budget": (("budget",), "much", r"^memory_budget: 'much' is not a size"),
    "a policy": (("config", "policy"), "full", r"^plan: its config has 'policy', which would count for nothing"),
    "a rule": (("config", "save"), None, r"^plan: its config has 'save', which would count for nothing"),
}


@pytest.mark.parametrize("edit", EDITED)
def test_a_plan_that_was_edited_is_refused_where_it_is_read(plans, edit):
    (*path, last), value, message = EDITED[edit]
    saved = json.loads(json.dumps(plans[2].to_dict()))
    place = saved
    for key in path:
        place = place[key]
    place[last] = value
    with pytest.raises(ValueError, match=message):
        Plan.from_dict(saved)


def test_a_plan_in_another_format_is_to_be_made_again(plans):
    saved = plans[2].to_dict()
    before = {name: value for name, value in saved.items() if name != "format"}
    for other, who in ((before, "an ac-core before formats"), (saved | {"format": 2}, "another ac-core, in format 2")):
        with pytest.raises(ValueError, match=f"^plan: it was saved by {who}.* make the plan again with ac_core.plan"):
            Plan.from_dict(other)
    config = ActivationCheckpointingConfig(policy="budget", plan=before["blocks"], **before["config"])  # as it says
    assert config.plan == plans[2].to_config().plan


def test_it_is_shown_block_by_block(plans):
    lines = str(plans[2]).splitlines()
    assert lines[0].startswith("plan for ")
    shown = [line.split()[0] for line in lines[2:]]
    assert shown[0].startswith("layers.0")
    assert sum(int(line.split()[1]) for line in lines[2:]) == 5


def test_the_public_verb(decoder, batch, resident):
    plan = ac_core.plan(
        decoder, batch=batch, budget="60%", dtype=torch.float32, optimizer="none", scope="language", device="cpu"
    )
    model = decoder()
    usage = measured_under(plan, model, batch)
    assert usage.peak_bytes + resident(model, batch) == plan.peak_bytes <= plan.budget_bytes


def test_a_mistake_is_told_before_anything_is_simulated(decoder, batch, monkeypatch):
    monkeypatch.setattr(planner, "measured", lambda _: pytest.fail("it was simulated"))
    with pytest.raises(ValueError, match="24gib"):
        ac_core.plan(decoder, batch=batch, budget="24gib")
    with pytest.raises(ValueError, match="batch_size: None"):
        ac_core.plan(decoder, budget="24GiB")
    with pytest.raises(ValueError, match="^scope: "):
        ac_core.plan(decoder, batch=batch, budget=0.5, scope="langauge")


def test_apply_plans_by_itself_for_a_batch(decoder, batch):
    config = ActivationCheckpointingConfig(policy="budget", memory_budget=0.75)
    with pytest.raises(ActivationCheckpointingError, match=r"^memory_budget: .*batch="):
        ac_core.apply_activation_checkpointing(decoder(2), config)
    model = decoder()
    report = ac_core.apply_activation_checkpointing(model, config, batch=batch)
    assert len(report.applied_blocks) > 0
    assert [group.asked for group in report.groups] == [group.applied for group in report.groups]
    ac_core.remove_activation_checkpointing(model)
    assert not any("forward" in vars(module) for module in model.modules())


def test_verify_hands_on_its_batch(decoder, batch, plans, monkeypatch):
    given = []
    monkeypatch.setattr(planner, "plan_here", lambda *args: given.append(args) or plans[2])
    model, config = decoder(), ActivationCheckpointingConfig(policy="budget", memory_budget="1MiB")
    assert ac_core.verify(model, batch, config).equal
    assert given == [(model, config, batch, None)]


class _Unlike(nn.Module):
    def __init__(self, kind: str, width: int, out: int) -> None:
        super().__init__()
        self.kind = kind
        self.up = nn.Linear(width, 4 * width if kind == "mlp" else out)
        self.down = nn.Linear(4 * width, out) if kind == "mlp" else None

    def forward(self, x):
        if self.down is not None:
            return self.down(nn.functional.gelu(self.up(x)))
        return torch.exp(self.up(x.unflatten(0, (-1, 2)).mean(1))).sin()


def _unlike():
    return nn.Sequential(_Unlike("pool", 8, 8), _Unlike("mlp", 8, 64), _Unlike("pool", 64, 64))


def test_of_unlike_blocks_every_budget_has_a_plan_that_some_choice_is_within():
    """Blocks that halve their batch need other bytes beside them than the figures of one step show."""
    settings = {"batch": torch.randn(16, 32, 8), "dtype": None, "optimizer": "none", "device": "cpu"}
    settings |= {"blocks": _Unlike, "loss": lambda out: out.sum()}
    choices = [dict(zip("012", chosen, strict=True)) for chosen in product(("none", "full"), repeat=3)]
    configs = [ActivationCheckpointingConfig(policy="budget", plan=chosen) for chosen in choices]
    peaks = {ac_core.estimate(_unlike, policy=config, **settings).peak_bytes for config in configs}
    for budget in sorted(peaks)[:3]:
        assert ac_core.plan(_unlike, budget=budget, **settings).peak_bytes <= budget
    with pytest.raises(ActivationCheckpointingError, match=f"Give at least {min(peaks)} bytes"):
        ac_core.plan(_unlike, budget=min(peaks) - 1, **settings)
