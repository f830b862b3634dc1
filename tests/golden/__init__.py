"""The golden set: calls whose every bit must survive a restructuring of the package.

    python -m tests.golden record --device cpu --out FILE.json
    python -m tests.golden compare FILE.json        # exit status 1 if anything differs
    python -m tests.golden host --device cpu        # microseconds of the host, per small call

Modules:
    calls       the table: each call by its name
    given       the inputs of a call
    operators   how a row of the table becomes inputs and a function of them; public functions alone
    attention   the same for attention
    derivatives ways to run that function
    inside      all that reaches into the package, to be adapted when modules move
    record      runs a call, and describes what it returned
    host        how long the host takes

records/h200.json was recorded before the package was divided into core, ops and tools (commit
912caf0, torch 2.11, Triton 3.6), so `compare` with it lists what has changed on purpose since then.
A record of the last commit before that division differed from commit 923c2e7, after it, in 23 lines
of 13 calls: by the new default workspace, and by the kernel of decision 0045, which was deleted.
Later commits changed 46 calls in 148 lines, about 25 of these calls of attention: by kernels for
small problems, by a delta from numbers that are not rounded, and by single products for few tokens.
test_golden.py holds no record: it tests that calls repeat their bits, and that `compare` finds a
difference.
"""
