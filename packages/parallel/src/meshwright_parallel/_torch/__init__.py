"""Private torch names that this package uses, each in one place."""
