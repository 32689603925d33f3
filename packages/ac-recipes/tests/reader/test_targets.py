import pytest

REFUSED = "a recipe is data and imports nothing; '_target_: {}' is not a known name"


def test_a_known_name_becomes_its_fields(read, schema):
    recipe = read("model: a\ndistributed: {_target_: automodel.distributed.DDP, find_unused_parameters: true}")
    assert recipe.distributed == schema.DDP(find_unused_parameters=True)


def test_what_is_written_beside_it_wins(read):
    text = "model: a\noptimizer:\n  name: sgd\n  _target_: torch.optim.AdamW\n"
    assert read(text).optimizer.name == "sgd"
    assert read("model: a\noptimizer: {_target_: torch.optim.AdamW}", "--optimizer.name", "sgd").optimizer.name == "sgd"


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("os.getpid", "os.getpid"),
        ("builtins.exec", "builtins.exec"),
        ("'torch.optim'", "torch.optim"),
        ("[os, getpid]", "..."),
        ("", ""),
    ],
)
def test_any_other_name_is_refused(mistakes, written, shown):
    (line,) = mistakes(f"model: a\noptimizer:\n  _target_: {written}\n")
    assert line.partition(": ")[2] == f"optimizer._target_: {REFUSED.format(shown)}"


def test_known_names_are_suggested(mistakes):
    for written, meant in [
        ("torch.optim.AdamV", "torch.optim.AdamW"),
        ("nemo.optim.AdamW", "torch.optim.AdamW"),
    ]:
        assert mistakes(f"model: a\noptimizer: {{_target_: {written}}}") == [
            f"r.yaml:2:23: optimizer._target_: {REFUSED.format(written)}; did you mean {meant!r}?"
        ]


def test_the_rest_of_the_mapping_is_checked_but_nothing_is_missing_from_it(mistakes):
    assert mistakes("model: a\nlayers:\n- _target_: Layer\n  nmae: 3\n") == [
        f"r.yaml:3:13: layers[0]._target_: {REFUSED.format('Layer')}",
        "r.yaml:4:3: layers[0].nmae: unknown field; did you mean 'name'?",
    ]


def test_names_are_refused_where_any_data_may_stand_and_on_the_command_line(mistakes):
    assert mistakes("model: a\nextra: [{deep: {_target_: os.system}}]", "--optimizer._target_", "os.getpid") == [
        f"r.yaml:2:27: extra[0].deep._target_: {REFUSED.format('os.system')}",
        f"command line:1:1: optimizer._target_: {REFUSED.format('os.getpid')}",
    ]


def test_a_mistake_in_what_a_name_stands_for_is_placed_at_the_name(mistakes):
    assert mistakes("model: a\noptimizer: {_target_: automodel.distributed.DDP}") == [
        "r.yaml:2:13: optimizer.strategy: unknown field; 'strategy' belongs in 'distributed'; "
        "did you mean 'distributed.strategy'?",
        "r.yaml:2:13: optimizer.activation_checkpointing: unknown field; "
        "'activation_checkpointing' belongs in 'distributed'; did you mean 'distributed.activation_checkpointing'?",
    ]
