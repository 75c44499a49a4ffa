"""Which values of a graph belong to one token each, and what a decoder must keep of them."""
