"""Token programs on the CPU: `schedule.py` puts their definitions in phases, `source.py` writes them as C,
`run.py` calls it."""
