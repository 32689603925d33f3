"""The command line: `python -m tools.bench {full,selective,host}`."""

import argparse
import json
import sys

import torch

from tools.bench import peers
from tools.bench.contestant import Contestant
from tools.bench.results import Goal, Missing, Row, full_goals, host_goals, make_row, selective_goals
from tools.bench.rounds import Seconds, time_rounds
from tools.bench.shapes import SHAPES, Shape, build_batch, build_model
from tools.bench.show import as_data, table, versions
from tools.bench.variants import Unavailable, Variant, hugging_face, no_checkpointing, ours, torch_wrapper

_DEFAULT_SHAPE = {"full": "d512", "selective": "d512", "host": "d64"}


def variants_of(command: str, our_options: list[str]) -> list[Variant]:
    """What a command compares, no checkpointing first. `our_options`: JSON objects, each a selective of ours more."""
    selective = [ours("selective"), *(ours("selective", json.loads(text), text) for text in our_options)]
    full = [ours("full"), hugging_face(), torch_wrapper()]
    peers_full = [peers.torchtitan("full"), peers.automodel("full"), peers.automodel_without_lookup("full")]
    peers_selective = [
        peers.torchtitan("selective"),
        peers.automodel("selective"),
        peers.automodel_without_lookup("selective"),
    ]
    chosen = {
        "full": full + peers_full,
        "selective": [ours("full"), *peers_selective, *selective],
        "host": full + peers_full + peers_selective + selective,
    }
    return [no_checkpointing(), *chosen[command]]


def run(variants: list[Variant], shape: Shape, rounds: int) -> tuple[list[Row], list[Missing], Seconds]:
    """Examine every variant, then time those that run against one another."""
    model, batch = build_model(shape), build_batch(shape)
    contestants: dict[str, Contestant] = {}
    missing, examined = [], {}
    expected = None
    for variant in variants:
        _say(f"examining {variant.name}")
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
        progress=lambda done: _say(f"round {done} of {rounds}"),
    )
    rows = [
        make_row(
            name,
            contestant.variant.owner,
            contestant.variant.policy,
            seconds,
            blocks=shape.blocks,
            memory=examined[name][0],
            gradients=examined[name][1],
        )
        for name, contestant in contestants.items()
    ]
    return rows, missing, seconds


def goals_of(command: str, rows: list[Row], seconds: Seconds) -> list[Goal]:
    """The goals that a command speaks to."""
    if command == "full":
        return full_goals(rows, seconds)
    return (selective_goals if command == "selective" else host_goals)(rows, peers.PEERS)


def main(arguments: list[str] | None = None) -> None:
    """Parse, run, print. Progress goes to standard error."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench", description=sys.modules["tools.bench"].__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("command", choices=_DEFAULT_SHAPE)
    parser.add_argument("--shape", choices=SHAPES, help="default: d512; host: d64")
    parser.add_argument("--rounds", type=_rounds, default=11, help="timed rounds, 7 or more (default 11)")
    parser.add_argument(
        "--ours",
        type=_options,
        action="append",
        default=[],
        metavar="JSON",
        help="one selective of ours more, with these fields of its config: '{\"save\": [\"attention\"]}'; repeatable",
    )
    parser.add_argument("--json", action="store_true", help="one object on standard output instead of the table")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    shape = SHAPES[asked.shape or _DEFAULT_SHAPE[asked.command]]
    rows, missing, seconds = run(variants_of(asked.command, asked.ours), shape, asked.rounds)
    goals = goals_of(asked.command, rows, seconds)
    if asked.json:
        print(json.dumps(as_data(asked.command, shape, asked.rounds, rows, missing, goals), indent=1))
        return
    held = f"d{shape.hidden_size}, S{shape.sequence_length}, B{shape.batch_size}, {shape.blocks} blocks, fp32, one thread"
    print(f"{asked.command}: {held}, {asked.rounds} rounds of {shape.steps}")
    print(", ".join(f"{name} {number or 'not installed'}" for name, number in versions().items()))
    print(table(rows, missing, goals))


def _rounds(text: str) -> int:
    if not text.isdecimal() or int(text) < 7:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 7: fewer give no stable median")
    return int(text)


def _options(text: str) -> str:
    try:
        options = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from error
    if not isinstance(options, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object such as '{{\"save\": [\"attention\"]}}'")
    return text


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
