"""Peak memory of a training step, foretold: the step runs on fake tensors, which have shapes and no data."""
