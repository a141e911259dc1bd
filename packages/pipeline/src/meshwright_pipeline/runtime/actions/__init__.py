"""The actions of a step on one rank: forwards and backwards of stages, and the code after the last unit."""
