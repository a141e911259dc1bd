"""Expert parallelism: which modules hold experts (detect, probe), and how tokens reach them (dispatch, exchange)."""
