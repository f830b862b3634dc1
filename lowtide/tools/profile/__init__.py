"""Record memory over time from the allocator.

The record becomes a snapshot for PyTorch's viewer and a picture.

Modules, in the order of imports:

* record: a snapshot of all that a block of code allocates.
* run: run a user's script, or training steps of a model, and record it.
* timeline: the bytes held over time, and their picture.
* last_stage: the same of a decoder's norm, head and loss, eager and lowtide.
"""
