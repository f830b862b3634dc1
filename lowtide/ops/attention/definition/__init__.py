"""Define what attention computes: the tensors of a call, its masks, its checks, and its reference.

Nothing here chooses a backend or runs a kernel.

The modules, in the order of imports (a module imports only those above it):

    intervals.py       the interval of keys that each query sees, and which vectors are kept
    masks.py           the mask classes
    block_diagonal.py  the masks of several sequences
    operands.py        the tensors and options of a call, in one layout
    validation.py      errors for arguments that do not fit
    layouts.py         views from the callers' layouts to [B, H, M, K] and back
    dropout.py         which scores dropout keeps
    reference.py       the definition, with all scores at once
"""
