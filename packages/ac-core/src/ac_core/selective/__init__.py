"""The policy that keeps the outputs of chosen calls, so that the recompute does not run them again."""
