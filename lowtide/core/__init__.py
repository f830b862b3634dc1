"""Hold the code that operators share; nothing here imports from the rest of lowtide.

Modules, in import order (a module imports only from those above it):

torch_private     torch's private functions, each with a substitute
errors            the two classes of errors for arguments; advice on names of other libraries
checks            check one argument of a call; reject nested, sparse and quantized tensors
strides           memory layouts of operands: rows, copies, alignment, tensor maps
compile_ahead/    compile the Triton kernels of a first call side by side, in threads
bfloat16_units/   GEMMs of bfloat16 operands with float32 results on a CPU, in C++
kernels/          capabilities of the device, launches, and what several operators' kernels use
collectives       gathers and sums over the ranks of a process group, by its name
recording/        record what a function does with its tensors; repeat it for tensors alike
elementwise       exponentials in place, and the slope of a soft cap, in torch
autodiff          which transforms are active; gradients that can be differentiated again
rowwise/          a function of rows, computed chunk by chunk, with derivatives of any order
matmul            operands by chunks of rows and blocks of classes; GEMMs with float32 accumulators
pending_gradient  the factor that all rows share: which part of it is applied when
fsdp              parameters that FSDP2 shards: gathered once, gradients reduced
operator          registration of operators with torch.library
flop_formula      formulas of FLOPs for FlopCounterMode, without importing its module
"""
