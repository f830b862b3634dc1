"""Measure time, memory and error of lowtide beside torch and the peers.

Every row is measured in turn with a floor or with its peers, in one process.

Modules, in the order of imports:

* cases: the shapes of the loss's benchmark, and their tensors.
* providers: the implementations of the loss, and what an entry of the benchmark is.
* measure: one row, an entry on a case.
* table: rows as a table and as a CSV.
* options: entries for every option of the loss.
* chunked: entries for the chunked loss.
* trained: the loss's cases with the head of a trained model.
* draw: the figure of a sweep.
* dots: a figure of ratios over many cases.
* compare: the figures of two CSVs, row by row.
* attention: the benchmark of attention.
* ranks: the loss on several ranks.
* heads: the loss on the heads of public models.
* host: what a call of each operator takes of the host.
* step_cases: the models whose whole steps are measured.
* steps: whole steps of fine-tuning public models.
"""
