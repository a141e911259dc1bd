"""The recorded graph of a run, the module call stack, and kinds of torch functions."""
