"""Triton's interpreter in half the time, by leaving out what it does for nothing.

A Triton without the names below is left as it is: then the tests take longer, that is all.
"""

from dataclasses import replace

from triton.runtime import interpreter


def leave_out_what_has_no_effect() -> None:
    if hasattr(interpreter, "_patch_lang") and hasattr(interpreter, "GridExecutor"):
        _replace_the_language_once_a_launch()
    builder = getattr(interpreter, "interpreter_builder", None)
    options = getattr(builder, "options", None)
    if hasattr(options, "sanitize_overflow") and not options.debug:
        # Each sum and product of integers is formed again in 64 bits, compared, and the result thrown away:
        # device_assert looks at it where `debug` is set alone.
        builder.options = replace(options, sanitize_overflow=False)


def _replace_the_language_once_a_launch() -> None:
    """The functions of triton.language are replaced at each launch, and again at each call of one jitted
    function by another, of which a launch has dozens. What is replaced is that of a module's names."""
    replace_language, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    done = set()

    def replace_once(function):
        module = id(function.__globals__)
        if module in done:
            return None
        done.add(module)
        return replace_language(function)

    def launch_afresh(self, *arguments, **options):
        done.clear()  # at its end a launch puts everything back
        try:
            return launch(self, *arguments, **options)
        finally:
            done.clear()

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = replace_once, launch_afresh
