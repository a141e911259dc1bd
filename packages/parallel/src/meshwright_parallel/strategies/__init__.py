"""The strategies of this package, one module each. The plugin host finds them through `meshwright_parallel.plugin`."""
