"""The fuzzer: random calls of everything public, each against float64, for as long as it is given.

`python -m tests.fuzz --help` says how to run it, CONTRIBUTING.md when. One integer determines a
case.

__main__.py    the command line and the summary
subjects.py    what is called, by name, and the module of each
pool.py        processes that run cases: started again after a crash, stopped after a timeout
worker.py      one such process, and one case
draw.py        random numbers, tensors and memory layouts of a case, and its description
compare.py     whether a result is close enough to the truth
ways.py        how a call is differentiated: twice, checkpointed, under torch.func, ...
deferred*.py   programs of tensor operations on deferred logits; the other files are a subject each
"""
