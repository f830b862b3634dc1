"""The subjects of the fuzzer, and the module of each. The command line reads them without torch."""

SUBJECTS = {
    "loss": "tests.fuzz.loss",
    "log_probs": "tests.fuzz.log_probs",
    "positions": "tests.fuzz.positions",
    "distillation": "tests.fuzz.distillation",
    "attention": "tests.fuzz.attention",
    "chunked_loss": "tests.fuzz.chunked_loss",
    "deferred": "tests.fuzz.deferred",
}
