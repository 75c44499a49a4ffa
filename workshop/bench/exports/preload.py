"""What every process needs, imported once."""

import importlib

for name in ("transformers.modeling_utils", "transformers.generation", "attngraph.exporter.export"):
    importlib.import_module(name)
