"""The second opinion: graphs computed in float64 by one oracle, and compared by one rule."""
