"""What every process needs, imported once: the processes of `run.py` are copies of one that imported this."""

import importlib

for name in ("transformers.modeling_utils", "transformers.generation", "attngraph.api.compile"):
    importlib.import_module(name)
