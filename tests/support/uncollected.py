"""What a server imports first (ranks.py): it collects nothing while it imports the rest. The
processes that are forked from it turn the collector on again.
"""

import gc

gc.disable()
