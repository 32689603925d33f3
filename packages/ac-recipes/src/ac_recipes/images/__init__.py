"""Images with questions about them, for vision-language models.

`config` has the section and loads without torch; `digits` the images and the questions, `layout` how a model takes an
image, `examples` the batches.
"""
