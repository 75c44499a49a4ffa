"""InsertKVCache: from a graph of whole sequences to one that computes new tokens over a cache."""

from attngraph.passes.insert_kv_cache.insert import InsertKVCache

__all__ = ["InsertKVCache"]
