"""What the data sections of a recipe say that its files cannot honour."""

import pytest

from ac_recipes.load import load_recipe
from ac_recipes.reader import RecipeError, split_overrides


@pytest.mark.parametrize("field", ["split", "name"])
def test_a_subset_of_a_file_is_refused_where_it_is_asked_for(tmp_path, tiny_file, field):
    (tmp_path / "r.jsonl").write_text('{"text": "One."}\n')
    dataset = {"kind": "records", "path_or_dataset_id": str(tmp_path / "r.jsonl"), "sequence_length": 16}
    before, after = tiny_file.read_text().split("dataset:\n", 1)[0], tiny_file.read_text().split("tokenizer:", 1)[1]
    lines = "".join(f"  {key}: {value}\n" for key, value in dataset.items())
    tiny_file.write_text(f"{before}dataset:\n{lines}tokenizer:{after}")
    load_recipe(str(tiny_file), quick=True)
    _, overrides = split_overrides([f"--dataset.{field}=validation"])
    with pytest.raises(RecipeError) as caught:
        load_recipe(str(tiny_file), overrides, quick=True)
    (mistake,) = caught.value.mistakes
    assert f"dataset.{field}: 'validation' is of a dataset on the hub or in a folder, and " in str(mistake)
    assert str(mistake).endswith("r.jsonl is a file, which is taken whole; leave it out")
