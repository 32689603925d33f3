import pytest


def test_every_sort_of_field_is_read(read, schema):
    text = """\
        model: a
        seed: 7
        bits: 16
        steps: until it converges
        distributed:
          strategy: fsdp2
          activation_checkpointing:
            policy: budget
            scope: [language, vision]
            memory_budget: 24GiB
          dp_size: 8
        optimizer:
          lr: 1e-4
          betas: [0.9, 1]
          schedule: {warmup: 10, decay: .5}
        layers:
        - {width: 1}
        - width: 2
          name: last
        tags: {a: b}
        extra: {when: 2024-01-01, list: [1, yes, ~]}
        """
    assert read(text) == schema.Recipe(
        model="a",
        seed=7,
        bits="16",
        steps="until it converges",
        distributed=schema.FSDP2(
            activation_checkpointing=schema.Checkpointing(
                policy="budget", scope=("language", "vision"), memory_budget="24GiB"
            ),
            dp_size=8,
        ),
        optimizer=schema.Optimizer(lr=1e-4, betas=(0.9, 1.0), schedule={"warmup": 10.0, "decay": 0.5}),
        layers=[schema.Layer(width=1), schema.Layer(width=2, name="last")],
        tags={"a": "b"},
        extra={"when": "2024-01-01", "list": [1, "yes", None]},
    )


@pytest.mark.parametrize(
    ("section", "line"),
    [
        ("optimizer: [1]", "r.yaml:2:12: optimizer: expected a mapping, got a list"),
        ("optimizer:", "r.yaml:2:11: optimizer: expected a mapping, got nothing"),
        ("optimizer: {betas: [0.9]}", "r.yaml:2:20: optimizer.betas: expected 2 items, got 1"),
        ("optimizer: {betas: [0.9, x]}", "r.yaml:2:26: optimizer.betas[1]: expected a number, got 'x'"),
        ("optimizer: {betas: 0.9}", "r.yaml:2:20: optimizer.betas: expected a list, got the number 0.9"),
        ("optimizer: {schedule: {a: b}}", "r.yaml:2:27: optimizer.schedule.a: expected a number, got 'b'"),
        ("layers: [{}]", "r.yaml:2:10: layers[0]: missing required field 'width'"),
        ("layers: {width: 1}", "r.yaml:2:9: layers: expected a list, got a mapping"),
        ("tags: [a, 1]", "r.yaml:2:11: tags[1]: expected a string, got the number 1; quote it: '1'"),
        ("seed: {}", "r.yaml:2:7: seed: expected an integer, got a mapping"),
    ],
)
def test_what_does_not_fit_is_told_where_it_stands(mistakes, section, line):
    assert mistakes(f"model: a\n{section}") == [line]


def test_a_missing_field_is_told_at_the_mapping(mistakes):
    assert mistakes("\n  seed: 1\n") == ["r.yaml:2:1: missing required field 'model'"]


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        (
            "{scope: langauge}",
            "r.yaml:2:49: distributed.activation_checkpointing.scope: "
            "'langauge' is not one of 'all', 'language', 'vision'; did you mean 'language'?",
        ),
        (
            "{policy: budget}",
            "r.yaml:2:41: distributed.activation_checkpointing.memory_budget: needed for the policy 'budget'",
        ),
        (
            "{memory_budget: -0.1}",
            "r.yaml:2:41: distributed.activation_checkpointing: the budget is -0.1; it must not be negative",
        ),
    ],
)
def test_what_post_init_refuses_is_placed_at_the_field_it_names(mistakes, asked, line):
    assert mistakes(f"model: a\ndistributed: {{activation_checkpointing: {asked}}}") == [line]


def test_a_dataclass_with_a_wrong_field_is_not_made(mistakes):
    # __post_init__ would say that the budget is missing
    assert mistakes("model: a\ndistributed: {activation_checkpointing: {policy: budget, memory_budget: [1]}}") == [
        "r.yaml:2:73: distributed.activation_checkpointing.memory_budget: "
        "expected null, a number, or a string; got a list"
    ]


def test_shared_values_are_read_at_each_place(mistakes):
    assert mistakes("model: a\nextra: &s {lrr: 1}\noptimizer: *s") == [
        "r.yaml:2:12: optimizer.lrr: unknown field; did you mean 'lr'?"
    ]
