"""Process groups, device meshes, and the layout of a tensor on a mesh."""
