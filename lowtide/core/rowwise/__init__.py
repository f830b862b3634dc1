"""Compute functions of rows chunk by chunk, with derivatives of any order.

variables       new variables, and products with the Jacobian by them
row_function    the functions, and their derivatives
"""
