"""Other libraries' training loops over parallel models: a module for each library, which only that module imports."""
