import pytest


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("modle: a", "r.yaml:1:1: modle: unknown field; did you mean 'model'?"),
        ("quux: a", "r.yaml:1:1: quux: unknown field"),
        ("optimizer: {lrr: 1}", "r.yaml:1:13: optimizer.lrr: unknown field; did you mean 'lr'?"),
        ("lr: 1", "r.yaml:1:1: lr: unknown field; 'lr' belongs in 'optimizer'; did you mean 'optimizer.lr'?"),
        (
            "optimizer: {seed: 1}",
            "r.yaml:1:13: optimizer.seed: unknown field; 'seed' belongs at the top level; did you mean 'seed'?",
        ),
        (
            "policy: full",
            "r.yaml:1:1: policy: unknown field; 'policy' belongs in 'distributed.activation_checkpointing'; "
            "did you mean 'distributed.activation_checkpointing.policy'?",
        ),
        ("'two words': 1", "r.yaml:1:1: ['two words']: unknown field"),
        ("layers: [{wdith: 1}]", "r.yaml:1:11: layers[0].wdith: unknown field; did you mean 'width'?"),
    ],
)
def test_an_unknown_field_says_where_it_belongs(mistakes, text, line):
    assert line in mistakes(text)


def test_a_misspelt_required_field_is_not_missing_too(mistakes):
    assert mistakes("modle: a") == ["r.yaml:1:1: modle: unknown field; did you mean 'model'?"]
    assert mistakes("quux: a") == ["r.yaml:1:1: quux: unknown field", "r.yaml:1:1: missing required field 'model'"]


def test_thousands_unknown_fields_are_all_told(mistakes):
    lines = mistakes("".join(f"modle{i}: 1\n" for i in range(4000)))
    assert len(lines) == 4000
    assert lines[0] == "r.yaml:1:1: modle0: unknown field; did you mean 'model'?"
    assert lines[-1] == "r.yaml:4000:1: modle3999: unknown field"
