"""Which part of a value each of several ranks has, derived from what its elements are computed from."""
