"""Token programs on the CPU: `schedule.py` puts their definitions in phases, `source.py` writes them as C
between tables and `c/phases.h`, `run.py` calls it."""
