"""Report what this machine has and how it computes a call. `lowtide doctor` prints it.

Modules, in the order of imports:

* environment: versions, devices and switches.
* cpu: the CPU's bfloat16 units, compiler and threads.
* collectives: what a call of a divided head moves.
* linear_cross_entropy: the engine and the plan of a call of the loss.
* attention: the backend of a call of attention, and why.
* selftest_cases: fifty calls, and their definitions in plain torch.
* selftest: their errors, against the definitions in float64.
"""
