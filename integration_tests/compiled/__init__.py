"""Compiled regions of known models: losses and gradients of one device."""
