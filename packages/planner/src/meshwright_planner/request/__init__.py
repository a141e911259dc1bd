"""What a planning request asks for."""
