"""Tell a call from its rehearsal, in which a first call on a card finds out what it launches."""

from lowtide.core.compile_ahead.notes import in_rehearsal as in_rehearsal
