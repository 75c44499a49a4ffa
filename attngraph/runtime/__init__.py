"""Runs traced graphs: executables, decoders, engines and caches."""
