"""Register the operators torch.ops.lowtide.linear_*, their derivatives and fake versions.

An operator runs the engine of its plan; a compiled graph contains it as one node.

Modules, in import order (a module imports only from those above it):

arguments                 the schema of the operators, and their arguments as a call
planner                   the plan of a call: which engine, and how it uses its memory
own_call                  what a rank tells the others of a call
positions                 the gradients of a K-dimensional loss, one position after the other
ops                       the operators themselves
fake                      shapes and dtypes of outputs, FLOPs and memory, without running them
higher_order              the chunked definition, for transforms and higher derivatives
autograd                  the operators' first derivatives
remembered_call           a call like an earlier one, by its engine without deciding again
remembered_call_of_ranks  the same for a divided head, whose ranks agree anew in each call
signatures                what tells calls apart, and which of them are remembered
"""
