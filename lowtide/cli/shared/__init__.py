"""Hold what several commands use.

Modules, in the order of imports:

* errors: turn an error that the user can correct into a sentence.
* parameters: options that several commands share, and their checks.
* progress: show the progress of work of unknown length.
"""
