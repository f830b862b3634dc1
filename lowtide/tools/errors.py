"""Define the error that the user of a command can correct."""


class UserError(Exception):
    """Report an error that the user can correct: one sentence, without a traceback."""
