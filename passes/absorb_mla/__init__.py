"""AbsorbMLA: attention over latents, without writing keys and values out where that is cheaper."""

from attngraph.passes.absorb_mla.absorb import WAYS, AbsorbMLA

__all__ = ["WAYS", "AbsorbMLA"]
