"""Turn the caller's two functions, head and loss_fn, into one function of all their tensors.

Modules, in the order of imports:

    fsdp.py        gather the parameters of an FSDP2 unit once around all chunks
    tensors.py     find the tensors that the functions bring along, and replace them by copies
    threads.py     keep two threads from replacing the parameters of one module at a time
    leaves.py      the leaves of the chunks' graphs; errors for tensors whose gradient would be lost
    constants.py   the constants that the functions' code reaches
    snapshot.py    check that a chunk is computed again from the same values
"""
