from dataclasses import dataclass


def test_the_tag_picks_the_class(read, schema):
    assert read("model: a\ndistributed: {strategy: ddp}").distributed == schema.DDP()
    assert read("model: a\ndistributed: {strategy: 'fsdp2'}").distributed == schema.FSDP2()


def test_without_a_tag_the_keys_pick_it_and_else_it_is_the_first(read, schema):
    assert read("model: a\ndistributed: {find_unused_parameters: true}").distributed == schema.DDP(
        find_unused_parameters=True
    )
    assert read("model: a\ndistributed: {activation_checkpointing: true}").distributed == schema.FSDP2(
        activation_checkpointing=True
    )


def test_an_unknown_tag_near_a_valid_one_is_read_on_as_that_one(mistakes):
    text = """\
        model: a
        distributed:
          strategy: fsdp
          reshard_after_foward: true
          dp_size: two
        """
    assert mistakes(text) == [
        "r.yaml:3:13: distributed.strategy: expected one of 'fsdp2', 'ddp'; got 'fsdp'; did you mean 'fsdp2'?",
        "r.yaml:4:3: distributed.reshard_after_foward: unknown field for strategy 'fsdp2'; "
        "did you mean 'reshard_after_forward'?",
        "r.yaml:5:12: distributed.dp_size: expected null or an integer, got 'two'",
    ]


def test_any_other_unknown_tag_is_the_only_mistake_of_its_mapping(mistakes):
    for written, got in [("zero3", "'zero3'"), ("", "nothing"), ("[ddp]", "a list"), ("3", "the number 3")]:
        assert mistakes(f"model: a\ndistributed:\n  strategy: {written}\n  stage: 3") == [
            f"r.yaml:3:{12 if not written else 13}: distributed.strategy: expected one of 'fsdp2', 'ddp'; got {got}"
        ]
    assert mistakes("model: a\ndistributed: {strategy: !x ddp, stage: 3}") == [
        "r.yaml:2:25: distributed.strategy: a recipe is data and builds no objects: the tag '!x' is not read"
    ]


def test_a_key_of_another_variant_names_it(mistakes):
    assert mistakes("model: a\ndistributed: {strategy: ddp, dp_size: 2}") == [
        "r.yaml:2:30: distributed.dp_size: unknown field for strategy 'ddp'; 'dp_size' belongs to strategy 'fsdp2'"
    ]


@dataclass(frozen=True)
class Circle:
    radius: float


@dataclass(frozen=True)
class Box:
    width: float
    height: float = 1.0


@dataclass(frozen=True)
class Drawing:
    shape: Circle | Box | dict[str, int]


def test_untagged_classes_are_told_apart_by_their_keys(read, mistakes):
    assert read("shape: {radius: 1}", schema=Drawing).shape == Circle(1.0)
    assert read("shape: {width: 1}", schema=Drawing).shape == Box(1.0)
    assert read("shape: {depth: 1}", schema=Drawing).shape == {"depth": 1}
    assert mistakes("shape: {width: x}", schema=Drawing) == ["r.yaml:1:16: shape.width: expected a number, got 'x'"]
