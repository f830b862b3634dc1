"""Run the exponentials engine on a CPU with bfloat16 units.

exponentials/engine.py has the formulas.

Modules, in import order (a module imports only from those above it):

spec            which calls the engine runs, and how many bytes they take
engine          the engine
sharded_engine  the engine if the classes of a row are on several ranks
"""
