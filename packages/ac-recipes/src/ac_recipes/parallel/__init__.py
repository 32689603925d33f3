"""A recipe's `distributed:` section, put on a model: sizes to meshes, the model split and wrapped, gradients averaged.

The way of a model, one module a step: `layout` (sizes against ranks), `fit` (sizes against the model's configuration),
`meshes`, then `setup` applies in order `experts`, `tensor`, ac_core's checkpointing, `compiling` and `data`.
"""
