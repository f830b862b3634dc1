"""Define the arithmetic of a row, which all engines share.

Modules, in import order (a module imports only from those above it):

row_math         the formulas in torch: logits, statistics, coefficients of the gradient
row_math_triton  those that kernels share, in Triton
"""
