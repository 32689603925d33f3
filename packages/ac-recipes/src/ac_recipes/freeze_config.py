"""The section of a recipe that says what is not trained. Loads without torch."""

from dataclasses import dataclass

from ac_recipes.section import Section


@dataclass(frozen=True, kw_only=True)
class FreezeConfig(Section):
    """Parts of the model whose weights stay as they are; names and defaults are those of NeMo AutoModel.

    freeze_embeddings: every `nn.Embedding`, and with it a head that is tied to one.
    freeze_vision_tower, freeze_audio_tower: the towers that `distributed.activation_checkpointing_scope` calls `vision`
        and `audio`; a connector is neither.
    freeze_language_model: what the scope calls `language`.
    """

    freeze_embeddings: bool = True
    freeze_vision_tower: bool = True
    freeze_audio_tower: bool = False
    freeze_language_model: bool = False
