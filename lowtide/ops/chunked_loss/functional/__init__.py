"""Turn the caller's two functions, head and loss_fn, into a function of tensors alone.

Modules, in the order of imports:

    fsdp.py        gather the parameters of an FSDP2 unit once around all chunks
    tensors.py     the tensors that the functions bring along, and others in their places
    threads.py     no two threads replace the parameters of one module
    graph.py       the nodes of a loss's graph
    closures.py    errors for tensors that come through a closure or a global
    constants.py   the constants that the functions' code reaches
    snapshot.py    what must be the same when a chunk is computed again
"""
