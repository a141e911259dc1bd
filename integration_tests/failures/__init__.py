"""What happens when one rank of a job fails: every job ends soon, and its report names the rank and the cause."""
