"""FuseTokenWise: `fuse.py` has the pass, `formulas.py` one operation, `program.py` a region of them."""
