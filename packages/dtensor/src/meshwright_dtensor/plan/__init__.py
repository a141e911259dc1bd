"""The parallel plan: fields, validation, JSON, differences, text."""
