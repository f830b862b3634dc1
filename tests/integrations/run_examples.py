"""`python -m tests.integrations.run_examples` reads lines of a name and modules. It runs that
example in a process of its own, forked off this one when it has imported the modules, which takes
longer.
"""

import gc
import importlib
import json
import os
import runpy
import sys
import tempfile
import traceback

EXAMPLES = "examples"


def run(name: str) -> dict[str, object]:
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        child = os.fork()
        if child == 0:
            os.dup2(out.fileno(), 1)
            os.dup2(errors.fileno(), 2)
            status = 1
            try:
                runpy.run_path(f"{EXAMPLES}/{name}.py", run_name="__main__")
                status = 0
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        _, status, used = os.wait4(child, 0)
        for each in (out, errors):
            each.seek(0)
        seconds = used.ru_utime + used.ru_stime
        return {"status": status, "out": out.read(), "errors": errors.read(), "seconds": seconds}


if __name__ == "__main__":
    sys.path.insert(0, EXAMPLES)
    for line in sys.stdin:
        name, *modules = line.split()
        for module in ("lowtide", *modules):
            importlib.import_module(module)
        # Otherwise the collector of each process goes through all objects, writes to them, and so
        # copies them.
        gc.freeze()
        print(json.dumps(run(name)), flush=True)
    gc.unfreeze()  # otherwise extensions report the objects as a leak
