"""The interfaces that plugins implement: strategies and planners."""
