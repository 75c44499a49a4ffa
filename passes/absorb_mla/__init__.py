"""AbsorbMLA: attention over latents that does not compute keys and values where that is cheaper."""

from attngraph.passes.absorb_mla.absorb import WAYS, AbsorbMLA

__all__ = ["WAYS", "AbsorbMLA"]
