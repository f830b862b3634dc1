"""The golden set: calls whose every bit must survive a restructuring of the package.

    python -m tests.golden record --device cpu --out FILE.json
    python -m tests.golden compare FILE.json        # exit status 1 if anything differs
    python -m tests.golden host --device cpu        # microseconds of the host, per small call

Modules:
    calls       the table: each call by its name
    operators   how a row of the table becomes inputs and a function of them; public functions alone
    inside      all that reaches into the package, to be adapted when modules move
    record      runs a call, and describes what it returned
    host        how long the host takes
"""
