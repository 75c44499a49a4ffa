"""Differential fuzzing: random attention-like functions, compiled and eager, must give the same results.

    grammar.py    a case: one choice for each thing that people spell in different ways
    sample.py     graph n of a seed; repair.py replaces choices that contradict each other
    body.py       the lines of a case's function: operands.py, scores.py, masks.py, weights.py
    source.py     its text, compiled as it stands, and the inputs
    compare.py    the oracle: eager against compiled, in float64
    minimise.py   reduces a failing case, and prints it as a test
    worker.py     a process that runs cases; run.py drives several, within a budget
    search.py     searches of other kinds: around, causal.py, sizes.py and files

The commands are `fuzz` (run.py) and `search`.
"""
