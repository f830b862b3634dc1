"""Compute the loss and its gradients from chunks of rows, in bounded memory.

Each of the four engines derives from LossEngine alone and imports no other engine. Two have a class
of their own for a head whose classes are on several ranks.
spec.py in its folder says which calls it runs and what it holds. operator/planner.py chooses one
per call, operator/ops.py makes it.

Modules, in import order (a module imports only from those above it):

row_math            the formulas of a row in torch: logits, statistics, coefficients of the gradient
row_math_triton     those that kernels share, in Triton
gradients           memory for the gradients, and the factors still to be applied to them
part_stats          statistics of parts of the classes, gathered from the ranks and merged
excluded_part_stats the same of those that exclude the target
excluded_part_stats_triton   the same for a loss, in one Triton launch each
token_order         the tokens of all ranks, and sums of input gradients over the ranks
row_loss            the loss of each row, and the coefficients of its gradient
row_loss_triton     the same in one Triton launch each, where the backend is Triton
saved_stats         row statistics as an operator's outputs, with the engine that made them
gemm/               what the GEMM kernels share, in Triton and in Gluon
weight_gradient/    accumulators of the weight gradient, and the choice of one
engine              the walk over chunks of rows and blocks of classes; distillation uses it too
sharded_walk        the same where the classes of a row are on several ranks
loss_engine         the base of the engines: row statistics and gradients of a call's loss
logits/             the engine that stores float32 logits: "logits_torch" and "logits_triton"
exponentials/       the engine that stores exponentials, never logits, on a Hopper GPU
cpu_exponentials/   the same on a CPU
soft_targets/       the engine for class probabilities on a Hopper GPU
"""
