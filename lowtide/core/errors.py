"""Define the two classes of errors that a call raises for an argument.

Both are RuntimeErrors as well, because torch raises a RuntimeError for most such arguments.
"""


class ArgumentError(ValueError, RuntimeError):
    """Report a value or a shape that does not fit."""


class ArgumentTypeError(TypeError, RuntimeError):
    """Report a type or a dtype that does not fit."""
