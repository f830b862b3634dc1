"""List what is measured of a head on several ranks.

Modules:

* loss_parallel: the loss of torch's loss_parallel.
* tensor_parallel: a head whose classes are divided over ranks that have the same tokens.
* fsdp: a head that FSDP2 shards, or that `lowtide.shard_head` divides, on ranks with tokens of
  their own.
"""
