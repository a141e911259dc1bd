"""The local program of a call: derived once, written as source, and run on the local parts of its tensors."""
