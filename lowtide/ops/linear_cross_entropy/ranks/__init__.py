"""Let the ranks of a divided head agree on a call, or raise the same error.

Modules, in import order (a module imports only from those above it):

equal_values  find tensors whose numbers differ between ranks, on their device
messages      what the hosts of the ranks tell each other, errors too
agreement     what each rank tells of a call, and what all of them then know
"""
