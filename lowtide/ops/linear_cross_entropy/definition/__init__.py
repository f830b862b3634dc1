"""Define what a call computes and which arguments it accepts, whichever engine runs it.

Modules, in import order (a module imports only from those above it):

head         the tensors of a head and of a loss, its options, and the classes that a rank holds
vocab_shard  how the classes are divided over the ranks of a mesh
advice       advice in errors about arguments that do not fit
validation   check the arguments of a call
reference    the dense definition in torch, with all logits at once
"""
