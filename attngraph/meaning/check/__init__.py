"""The second opinion: a claim and the graph it would replace, computed in float64 and compared."""
