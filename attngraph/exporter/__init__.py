"""Writes a compiled model for runtimes that know nothing of attngraph: torch.export programs and ONNX.

The public function is `attngraph.export`, in `export.py`. (A folder `export` would take the function's name.)
"""
