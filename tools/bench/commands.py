"""The three comparisons: what each runs, and the goals it speaks to."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatch
from typing import Any

from tools.bench import peers
from tools.bench.contestant import Contestant
from tools.bench.results import Goal, Missing, Outcome, Row, full_goals, host_goals, make_row, selective_goals
from tools.bench.rounds import Seconds, time_rounds
from tools.bench.shapes import Shape, build_batch, build_model
from tools.bench.variants import Unavailable, Variant, hugging_face, no_checkpointing, ours, torch_wrapper

DEFAULT_SHAPE = {"full": "d512", "selective": "d512", "host": "d64"}
"""The commands, and the shape that each takes where none is named."""


def variants_of(
    command: str,
    our_options: Iterable[Mapping[str, Any]] = (),
    only: Sequence[str] = (),
    planned: Iterable[Variant] = (),
) -> list[Variant]:
    """What a command compares, no checkpointing first.

    our_options: config fields, each mapping one more selective of ours. planned: more of ours. only: globs over names;
    the others are left out.
    """
    full = [ours("full"), hugging_face(), torch_wrapper()]
    peers_full = [peers.torchtitan("full"), peers.automodel("full"), peers.automodel_without_lookup("full")]
    peers_selective = [
        peers.torchtitan("selective"),
        peers.automodel("selective"),
        peers.automodel_without_lookup("selective"),
    ]
    selective = [ours("selective"), *(ours("selective", options) for options in our_options), *planned]
    chosen = {
        "full": full + peers_full,
        "selective": [ours("full"), *peers_selective, *selective],
        "host": full + peers_full + peers_selective + selective,
    }
    wanted = [one for one in chosen[command] if any(fnmatch(one.name, glob) for glob in only or ["*"])]
    return [no_checkpointing(), *wanted]


def run(
    command: str, variants: Iterable[Variant], shape: Shape, rounds: int, say: Callable[[str], None] = lambda _: None
) -> Outcome:
    """Examine every variant one by one, then time those that run against one another.

    say: told of the progress, a line at a time.
    """
    model, batch = build_model(shape), build_batch(shape)
    contestants: dict[str, Contestant] = {}
    missing, examined, expected = [], {}, None
    for variant in variants:
        say(f"examining {variant.name}")
        try:
            contestant = Contestant(variant, model, batch)
        except Unavailable as reason:
            missing.append(Missing(variant.name, str(reason)))
            continue
        expected = expected or contestant.warm_up()
        examined[variant.name] = contestant.examine(expected)
        contestants[variant.name] = contestant
    seconds = time_rounds(
        {name: contestant.step for name, contestant in contestants.items()},
        rounds=rounds,
        repeats=shape.steps,
        progress=lambda done: say(f"round {done} of {rounds}"),
    )
    rows = [
        make_row(contestant.variant, seconds, shape.blocks, *examined[name]) for name, contestant in contestants.items()
    ]
    return Outcome(command, shape, rounds, rows, missing, _goals_of(command, rows, seconds))


def _goals_of(command: str, rows: list[Row], seconds: Seconds) -> list[Goal]:
    if command == "full":
        return full_goals(rows, seconds)
    return (selective_goals if command == "selective" else host_goals)(rows, peers.PEERS)
