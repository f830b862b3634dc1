"""Measure time, memory and error of lowtide beside torch and other packages.

Every row is measured in turn with a floor or with other implementations, in one process.

Modules, in the order of imports:

* cases: the shapes of the loss's benchmark, and their tensors.
* providers: the implementations of the loss, and the type of an implementation.
* timing: calls timed in turn, and their ratios by round.
* truth: the loss and its gradients by the definition, in float64 where that takes seconds at most.
* measure: one row, which is a provider on a case.
* table: rows as a table and as a CSV.
* options: providers for every option of the loss.
* chunked: providers for the chunked loss.
* distillation: the divergences of a student's and a teacher's head.
* trained: the loss's cases with the head of a trained model.
* draw: the figures of a sweep, and of ratios over many cases.
* compare: the figures of two CSVs, row by row.
* attention: the benchmark of attention.
* ranks: the loss on several ranks.
* heads: the loss on the heads of public models.
* host: the time of the host in a call of each operator.
* steps: whole steps of fine-tuning public models.
"""
