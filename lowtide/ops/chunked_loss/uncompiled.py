"""Hide the run of a call from torch.compile.

Importing this module imports Dynamo, which takes as long as importing torch. So api.py imports it
only if Dynamo is imported already.
"""

import torch

from lowtide.ops.chunked_loss import execute

run = torch.compiler.disable(
    execute.run,
    reason="chunked_loss runs its chunks eagerly: compile the step without fullgraph=True, so that the code "
    "before and after it is compiled, or compile head",
)
