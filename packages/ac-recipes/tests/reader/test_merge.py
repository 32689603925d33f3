import pytest

TEXT = """\
    model: a
    distributed:
      strategy: fsdp2
      activation_checkpointing: full
      dp_size: 2
    optimizer:
    """


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("true", True),
        ("off", False),
        ("null", None),
        ("full", "full"),
        ('"full"', "full"),
    ],
)
def test_values_are_read_by_the_rules_of_the_file(read, text, value):
    asked = read("model: a", "--distributed.activation_checkpointing", text).distributed.activation_checkpointing
    assert asked == value
    assert type(asked) is type(value)


@pytest.mark.parametrize("text", ["", " "])
def test_an_empty_value_turns_nothing_off(mistakes, text):
    for field in ("distributed.activation_checkpointing", "extra.x", "optimizer"):
        assert mistakes(f"{TEXT}  lr: 1\n", f"--{field}", text) == [
            f"command line:1:1: {field}: the value is empty, as an unset variable leaves it; write null or false if "
            "that is meant"
        ]
    field = "distributed.activation_checkpointing"
    told = mistakes(f"{TEXT}  lr: 1\n".replace("activation_checkpointing: full", "activation_checkpointing:"))
    assert len(told) == 1
    assert f"{field}: expected true, false, null, " in told[0]
    assert told[0].endswith("got nothing")


def test_lists_mappings_and_numbers(read, schema):
    recipe = read(
        "model: a",
        *["--distributed.activation_checkpointing", "{policy: full, scope: [language]}"],
        *["--optimizer.lr=1e-4", "--optimizer.betas", "[0.1, 0.2]", "--extra.range", "0-7,12-"],
    )
    asked = schema.Checkpointing(policy="full", scope=("language",))
    assert recipe.distributed == schema.FSDP2(activation_checkpointing=asked)
    assert recipe.optimizer == schema.Optimizer(lr=1e-4, betas=(0.1, 0.2))
    assert recipe.extra == {"range": "0-7,12-"}


def test_overrides_win_over_the_file_and_over_earlier_ones(read):
    recipe = read(
        TEXT, "--distributed.dp_size", "4", "--optimizer.lr", "1", "--optimizer.lr", "2", "--distributed.dp_size=8"
    )
    assert recipe.distributed.dp_size == 8
    assert recipe.optimizer.lr == 2  # a null section is filled
    assert recipe.distributed.activation_checkpointing == "full"


def test_an_override_of_one_alias_leaves_the_others(read):
    recipe = read("model: a\nextra: {x: &s {k: 1}, y: *s}", "--extra.x.k", "2")
    assert recipe.extra == {"x": {"k": 2}, "y": {"k": 1}}


def test_a_mapping_for_a_section_sets_the_fields_that_it_names(read, schema):
    text = "model: a\noptimizer: {lr: 1, betas: [0.1, 0.2], schedule: {a: 1}}"
    argv = ["--optimizer", "{lr: 2, schedule: {b: 2}}", "--distributed={dp_size: 4}", "--layers=[{width: 1}]"]
    recipe = read(text, *argv)
    assert recipe.optimizer == schema.Optimizer(lr=2, betas=(0.1, 0.2), schedule={"b": 2})
    assert recipe.distributed == schema.FSDP2(dp_size=4), "a section that the file does not have is made"
    assert recipe.layers == [schema.Layer(width=1)]
    assert read(text, "--optimizer={}").optimizer == read(text).optimizer
    assert read("model: a\nextra: {x: 1}", "--extra", "null").extra is None
    assert read("model: a", "--model", "b", "--seed=3") == read("model: b\nseed: 3")


def test_checkpointing_survives_a_mapping_for_its_section(read):
    recipe = read(TEXT + "  lr: 1\n", "--distributed={strategy: ddp, find_unused_parameters: true}")
    assert recipe.distributed.activation_checkpointing == "full"


def test_another_kind_leaves_behind_what_it_does_not_have(read, schema, mistakes):
    text = TEXT + "  lr: 1\n"
    recipe = read(text, "--distributed={strategy: ddp}")
    assert recipe.distributed == schema.DDP(activation_checkpointing="full"), "dp_size belongs to fsdp2"
    assert mistakes(text.replace("dp_size", "dpsize"), "--distributed={strategy: ddp}") == [
        "r.yaml:5:3: distributed.dpsize: unknown field for strategy 'ddp'"
    ]
    assert mistakes(text, "--distributed={find_unused_parameters: true}") == [
        "command line:1:1: distributed.find_unused_parameters: unknown field for strategy 'fsdp2'; "
        "'find_unused_parameters' belongs to strategy 'ddp'"
    ]


def test_mistakes_in_a_mapping_for_a_section_are_placed_at_the_flag(mistakes):
    argv = ["--optimizer", "{lrr: 1, betas: [1]}", "--layers=5", "--distributed", "{strategy: dpd}", "--seed={a: 1}"]
    assert mistakes(TEXT + "  lr: 1\n", *argv) == [
        "command line:1:1: optimizer.lrr: unknown field; did you mean 'lr'?",
        "command line:1:1: optimizer.betas: expected 2 items, got 1",
        "command line:1:34: layers: expected a list, got the number 5",
        "command line:1:45: distributed.strategy: expected one of 'fsdp2', 'ddp'; got 'dpd'; did you mean 'ddp'?",
        "command line:1:75: seed: expected an integer, got a mapping",
    ]
    assert mistakes("model: a\nlayers: []", "--optimizer={lr: 1", "--model={_target_: os.getpid}")[0].startswith(
        "command line:1:1: optimizer: not valid YAML: "
    )


def test_nothing_can_be_set_below_a_value(mistakes):
    text = TEXT + "  lr: 1\n"
    assert mistakes(text, "--distributed.activation_checkpointing.policy", "full", "--seed.x.y", "1") == [
        "command line:1:1: distributed.activation_checkpointing: cannot set a field of it: it is 'full' at r.yaml:4:29",
        "command line:1:52: seed: expected an integer, got a mapping",
    ]


def test_unknown_paths_are_told_as_in_the_file(mistakes):
    assert mistakes(TEXT, "--optimizer.lrr", "1", "--optimzer.lr", "1", "--optimizer.dp_size", "1") == [
        "command line:1:1: optimizer.lrr: unknown field; did you mean 'lr'?",
        "command line:1:19: optimzer: unknown field; did you mean 'optimizer'?",
        "command line:1:35: optimizer.dp_size: unknown field; 'dp_size' belongs in 'distributed'; "
        "did you mean 'distributed.dp_size'?",
    ]


def test_values_that_do_not_fit_are_placed_at_the_flag(mistakes):
    argv = ["--distributed.activation_checkpointing", "selctive", "--optimizer.betas", "[1, x]"]
    assert mistakes(TEXT, *argv) == [
        "command line:1:1: distributed.activation_checkpointing: expected true, false, null, "
        "one of 'none', 'full', 'selective', 'budget', or a mapping; got 'selctive'; did you mean 'selective'?",
        "command line:1:49: optimizer.betas[1]: expected a number, got 'x'",
    ]


def test_another_tag_makes_the_files_keys_unknown_there(mistakes):
    assert mistakes(TEXT + "  lr: 1\n", "--distributed.strategy", "ddp") == [
        "r.yaml:5:3: distributed.dp_size: unknown field for strategy 'ddp'; 'dp_size' belongs to strategy 'fsdp2'"
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("*.mlp", "not valid YAML: expected alphabetic or numeric character, but found '.'; quote it: '*.mlp'"),
        ("[a", "not valid YAML: expected ',' or ']', but got '<stream end>'; quote it: '[a'"),
        ("*a", "no anchor '&a' before this alias; quote it: '*a'"),
        ("####", "'#' begins a comment in YAML; quote it: '####'"),
        ("a # b", "'#' begins a comment in YAML; quote it: 'a # b'"),
        ("!x a", "a recipe is data and builds no objects: the tag '!x' is not read"),
        ("\0", "character '\\x00' is not allowed in YAML; quote it: \"\\u0000\""),
    ],
)
def test_values_that_are_not_yaml(mistakes, text, message):
    message = message.replace("; quote", "; as a string, quote") if "comment" not in message else message
    assert mistakes("model: a", "--extra.x", text) == [f"command line:1:1: extra.x: {message}"]


def test_a_quoted_number_sign_is_no_comment(read):
    assert read("model: a", "--extra.x", "'a # b'").extra == {"x": "a # b"}
    assert read("model: a", "--extra.x", "a#b").extra == {"x": "a#b"}


def test_values_are_checked_even_if_the_file_is_not_yaml(mistakes):
    assert mistakes("model: [", "--extra.x", "[") == [
        "r.yaml:1:9: not valid YAML: expected the node content, but found '<stream end>'",
        "command line:1:1: extra.x: not valid YAML: expected the node content, but found '<stream end>'; "
        "as a string, quote it: '['",
    ]


def test_a_path_of_too_many_parts(mistakes):
    (first, *_) = mistakes("model: a", "--" + ".".join("x" * 100_000), "1")
    assert first == "command line:1:1: more than 50 parts in a dotted path"
