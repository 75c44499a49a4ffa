"""From a call of the user's model to a program graph, and what that graph is valid for."""
