"""The main job, `meshwright train`: unmodified models on real text, in parallel, beside one device."""
