"""What a plan, a model or an optimizer must satisfy, and what is refused."""
