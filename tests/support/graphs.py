"""Tests of what torch.compile traces, which a torch before 2.11 does not."""

import pytest

from lowtide.core import torch_private

needs_tracing = pytest.mark.skipif(not torch_private.TRACES_PROPERTIES, reason=torch_private.UNTRACED)
