"""Compute loss and gradients for class indices; store exponentials, and never logits.

engine.py has the formulas. This engine runs on Hopper GPUs; cpu_exponentials/ is its counterpart
for CPUs.

Modules, in import order (a module imports only from those above it):

spec              which calls the engine can run, and how many bytes it holds
gemm/             the GEMM whose epilogue stores exponentials and partial sums
memory            where exponentials lie: in the workspace or in the weight gradient's memory
recompute         reduce the partial results of tiles; mark row tiles to compute again
row_coefficients  the Triton kernel that computes each row's gradient coefficients
row_log_probs     the Triton kernel that computes each row's log-probability and entropy statistics
input_gradient    the GEMM that forms rows of dX and skips ignored ones
target_order      sort the targets of each chunk
linear_term       form the gradients of one linear term of the head, chunk by chunk
row_statistics    run the GEMM on a chunk, and find the statistics of its rows
engine            walk over the chunks of a call
sharded_engine    the same where the classes of a row are on several ranks
"""
