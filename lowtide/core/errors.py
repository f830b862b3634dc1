"""The two errors that a call raises for an argument; torch raises a RuntimeError for most of these."""


class ArgumentError(ValueError, RuntimeError):
    """A value or a shape that does not fit; torch raises a RuntimeError for most of these."""


class ArgumentTypeError(TypeError, RuntimeError):
    """A type or a dtype that does not fit; torch raises a RuntimeError for most of these."""
