"""Compute the loss and its gradients from chunks of rows, in bounded memory.

There are four engines. Each derives from LossEngine, and none imports another one's class. The two
engines of exponentials have a second class, for a head whose classes are on several ranks. That of
logits has one for few tokens.

spec.py in an engine's folder says which calls the engine runs and how many bytes it holds.
operator/planner.py chooses the engine of a call, and operator/ops.py creates it.

Modules, in import order (a module imports only from those above it):

formulas/           the arithmetic of a row in torch and in Triton
gradients           memory for the gradients, and the factors still to be applied to them
gemm/               what the GEMM kernels share, in Triton and in Gluon
part_stats          statistics of parts of the classes, gathered from the ranks and merged
excluded_part_stats the same for statistics that exclude the target
excluded_part_stats_triton   the same for a loss, one Triton launch per function
token_order         the tokens of all ranks, and sums of input gradients over the ranks
row_loss            the loss of each row, and the coefficients of its gradient
row_results_triton  its results by row, and coefficients of log-probabilities, in Triton
row_loss_triton     the same on the backend "triton", one launch per function
saved_stats         row statistics as an operator's outputs, with the engine that made them
weight_gradient/    accumulators of the weight gradient, and the choice of one
engine              the walk over chunks of rows and blocks of classes; distillation uses it too
sharded_walk        the walk where the classes of a row are on several ranks
loss_engine         the base of the engines: row statistics and gradients of a call's loss
logits/             the engine that stores float32 logits, in torch or Triton
exponentials/       the engine that stores exponentials, never logits, on a Hopper GPU
cpu_exponentials/   the same on a CPU
soft_targets/       the engine for class probabilities on a Hopper GPU
"""
