"""What a graph depends on besides its arguments: the state of Python that the code of a model reads."""
