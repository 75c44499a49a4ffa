"""What runs a graph for several ranks: their mesh, their parts of parameters, and the check that they
agree."""
