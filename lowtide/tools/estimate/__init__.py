"""Estimate the peak memory of a training step.

The step runs on fake tensors, which have shapes and no data.

Modules, in the order of imports:

* setting: the choices that determine a step's memory.
* offline: keep a model's config from downloading or running anything.
* model: a model by name or from a `config.json`, real or fake.
* cuda: what a CUDA device would save and hold, for fake tensors on the CPU.
* ranks: the first of many ranks, in one process; a model sharded by FSDP2.
* tensor_parallel: a model's layers and classes divided by its tp_plan.
* tracker: the bytes that a step holds, by category, and their peak.
* step: one step on fake tensors.
* training: the same step with data, and its peak on a CUDA device.
* report: estimates as a table and as a picture.
* table: estimates as a CSV.
"""
