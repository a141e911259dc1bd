"""Clusters as numbers: devices, memory, links; the interface of cost models."""
