"""Small faults written into the compiler, and which of them the tests notice: `python -m workshop mutants`.

A mutant is one expression of a function that is changed (`places`). All mutants stand in one copy of the
tree, each behind a switch (`copies`): `E` becomes `(CHANGED if _mutant(7) else (E))`, so that one run of the
tests says which of them meet which mutant, and a process turns one on (`inside`, which runs in the copy).
"""
