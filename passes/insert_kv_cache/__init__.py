"""From a graph of whole sequences to one that computes new tokens over a cache (`insert.py`)."""
