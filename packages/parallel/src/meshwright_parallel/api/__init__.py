"""parallelize(), auto_parallelize() and distribute_module()."""
