"""From candidates to plans: rules, planned collectives, and notes."""
