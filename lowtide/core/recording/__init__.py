"""Record what a function does with its tensors, and repeat that for tensors that are alike.

Modules, in import order (a module imports only from those above it):

steps       what a recording consists of: allocations, launches, torch operations, collectives
script      write the steps as one Python function
recorded    record a function, and run its recordings
like_calls  an operator's recordings, by its constants and how its tensors lie
"""
