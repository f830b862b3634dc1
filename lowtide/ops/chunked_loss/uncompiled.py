"""Run a call's chunks hidden from torch.compile.

Importing this module imports Dynamo, which takes as long as importing torch. So api.py imports it
only where Dynamo is there already.
"""

import torch

from lowtide.ops.chunked_loss import execute

run = torch.compiler.disable(
    execute.run,
    reason="chunked_loss runs its chunks as they are: compile the step without fullgraph=True, which goes on "
    "before and after, or compile head",
)
