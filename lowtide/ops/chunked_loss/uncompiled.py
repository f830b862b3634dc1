"""Hide the run of a call, and its backward, from torch.compile.

Importing this module imports Dynamo, which takes as long as importing torch. So api.py imports it
only if Dynamo is imported already, and autograd.py only in a graph.
"""

import functools

import torch

from lowtide.ops.chunked_loss import autograd, execute

_hidden = functools.partial(
    torch.compiler.disable,
    reason="chunked_loss runs its chunks eagerly: compile the step without fullgraph=True, so that the code "
    "before and after it is compiled, or compile head",
)
run = _hidden(execute.run)
scaled_gradients = _hidden(autograd.GradientInForward.gradients)
recomputed_gradients = _hidden(autograd.Recompute.gradients)
