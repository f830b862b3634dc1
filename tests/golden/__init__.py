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

records/h200.json was recorded before the package was divided into core, ops and tools (commit 912caf0,
torch 2.11, Triton 3.6). Since then the default workspace has more room for a small call, and a weight's
float16 gradient keeps smaller numbers: that changes 18 lines of `compare`, and nothing else does.
"""
