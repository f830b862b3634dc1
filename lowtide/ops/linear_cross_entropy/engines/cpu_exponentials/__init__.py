"""Run the exponentials engine on a CPU with bfloat16 units, by exponentials/engine.py's formulas.

Modules, in import order (a module imports only from those above it):

gemm/           the GEMMs: bfloat16 operands, float32 accumulators
spec            when it runs, and what it holds
engine          the engine
sharded_engine  the same where the classes of a row are on several ranks
"""
