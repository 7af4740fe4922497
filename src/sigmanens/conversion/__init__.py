"""From a network to member-specific norms and heads, and back to plain networks."""
