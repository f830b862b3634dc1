"""Compute the loss and its gradients for class indices without storing logits, only exponentials.

engine.py has the formulas. It runs on a Hopper GPU; cpu_exponentials/ is the same on a CPU.

Modules, in import order (a module imports only from those above it):

spec              when it runs, and what it holds
gemm_triton       the GEMM whose epilogue stores exponentials and partial sums
gemm_gluon        the same pipelined in Gluon, for few features
gemm              choose and launch one of the two on a chunk's operands, once or more
memory            where exponentials lie: in the workspace or in the weight gradient's memory
recompute         sum the partial sums; recompute the row tiles that are marked
row_coefficients  the Triton kernel of the row coefficients
row_log_probs     that of the row statistics of log-probabilities and entropies
input_gradient    the GEMM that forms rows of dX and ends after those that count
target_order      sort the targets of each chunk
linear_term       the gradients of one linear term of the head, chunk by chunk
engine            the engine
sharded_engine    the same where the classes of a row are on several ranks
"""
