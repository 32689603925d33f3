"""The data of a run: from what the sections `dataset`, `tokenizer` and `packed_sequence` name to batches of tokens.

`ac_recipes.data.prepare.prepare` does all of it; `config` has the sections and loads without torch.
"""
