"""attngraph: a compiler for attention."""
