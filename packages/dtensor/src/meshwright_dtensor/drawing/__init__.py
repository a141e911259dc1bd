"""How the numbers of a part of a tensor are drawn as one device draws them, without the memory of the whole."""
