"""Sharding rules of aten ops."""
