"""The main job, `meshwright train`: unmodified models on real text, in parallel and on one device."""
