"""The schedules of this package."""
