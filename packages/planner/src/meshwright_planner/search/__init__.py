"""The search over configurations: what is legal, what is looked at, and what each costs."""
