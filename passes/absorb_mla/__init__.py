"""AbsorbMLA: attention over latents that does not compute keys and values where that is cheaper."""
