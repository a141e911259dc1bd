"""The seven schedules of this package."""
