"""Tokenizers give back the text, and are kept."""

import pytest

from ac_recipes.data.tokenizer import read_tokenizer, save_tokenizer, train_tokenizer, with_template
from ac_recipes.errors import UsageError

TEXT = "The square of four is sixteen.\n"


def test_a_trained_tokenizer_gives_back_the_text_and_is_the_same_every_time():
    tokenizer = train_tokenizer([TEXT], 300)
    for text in (TEXT, "naïve \u2603 \x00"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.backend_tokenizer.to_str() == train_tokenizer([TEXT], 300).backend_tokenizer.to_str()
    assert 257 <= len(tokenizer) <= 300


def test_it_is_kept_with_its_template(tmp_path):
    (tmp_path / "chat.jinja").write_text("{{ messages[0]['content'] }}")
    tokenizer = with_template(train_tokenizer([TEXT], 300), str(tmp_path / "chat.jinja"))
    save_tokenizer(tokenizer, tmp_path)
    again = read_tokenizer(tmp_path)
    assert again(TEXT)["input_ids"] == tokenizer(TEXT)["input_ids"]
    assert again.chat_template == "{{ messages[0]['content'] }}"
    assert again.eos_token_id == tokenizer.eos_token_id
    assert len(again) == len(tokenizer)


def test_a_template_that_cannot_be_read_is_named():
    with pytest.raises(UsageError, match=r"tokenizer\.chat_template: cannot read gone\.jinja"):
        with_template(train_tokenizer([TEXT], 300), "gone.jinja")
