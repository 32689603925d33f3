"""What a model is made of: its blocks, and the part of the model that each belongs to."""
