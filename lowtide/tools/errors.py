"""The error for what the user of a command can correct."""


class UserError(Exception):
    """Something that the user can put right: shown as one sentence, without a traceback."""
