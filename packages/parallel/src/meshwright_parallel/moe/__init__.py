"""Modules of experts: which they are (detect, probe), how tokens reach them (dispatch, exchange) or stay (apart, installing)."""
