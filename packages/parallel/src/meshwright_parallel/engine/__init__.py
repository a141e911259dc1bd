"""The data-parallel engine: bucketed gradient reduction, and unsharding of parameters as in FSDP2."""
