"""Calls of a decoder's graph that run again as few calls of C: `replay.py` says when, `recording.py` records
them and runs them, `links.py` chooses what C computes."""
