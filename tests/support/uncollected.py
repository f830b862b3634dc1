"""Turn the collector off in a server of ranks, which imports this first (ranks.py).

The processes that are forked from it turn the collector on again.
"""

import gc

gc.disable()
