"""Scripts of other libraries' users over parallel models: a script for each library, run on real ranks and on one device."""
