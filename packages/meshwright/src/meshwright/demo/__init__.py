"""The main job, `meshwright demo`: unmodified models on real text, in parallel and on one device."""
