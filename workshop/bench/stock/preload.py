"""What every process of these suites needs, imported once: a process per class is a copy of one that
imported this."""

import importlib

for name in ("transformers.modeling_utils", "transformers.generation", "attngraph.exporter.export"):
    importlib.import_module(name)
