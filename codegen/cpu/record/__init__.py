"""Recorded calls of a decoder's graph."""
