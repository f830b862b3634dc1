"""A call's chunks, as they are, out of sight of torch.compile. To import this file is to import Dynamo, which
takes as long as torch: api.py does it where Dynamo is there already."""

import torch

from lowtide.ops.chunked_loss import execute as chunks

run = torch.compiler.disable(
    chunks.run,
    reason="chunked_loss runs its chunks as they are: compile the step without fullgraph=True, which goes on "
    "before and after, or compile head",
)
