"""Hide functions of rows from torch.compile.

Importing this module imports Dynamo, which takes as long as importing torch. So row_function.py
imports it only in a graph.
"""

import torch

from lowtide.core.rowwise import row_function

evaluate_rows = torch.compiler.disable(
    row_function.evaluate,
    reason="lowtide computes gradients of class probabilities and class weights, derivatives of higher order "
    "and functions of deferred logits chunk by chunk, eagerly: compile the step without fullgraph=True, or "
    "detach what needs no gradient",
)
