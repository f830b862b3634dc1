"""The blocks of a page whose first line is `# needs several ranks`, on each rank of a group."""

from unittest.mock import patch

import torch.distributed as dist

from tests.docs import snippets


def run(page, rank):
    """Run a page's blocks one after the other; those lines of a block that print are compared."""
    names = {}
    blocks = [
        block
        for block in snippets.blocks_of(snippets.DOCS / f"{page}.md")
        if block.startswith("# needs several ranks\n")
    ]
    with patch.object(dist, "init_process_group"):  # the ranks have joined theirs
        printed = [
            snippets.run(block, names, f"{page}, block {number} of several ranks")
            for number, block in enumerate(blocks, 1)
        ]
    return {"printed": printed}
