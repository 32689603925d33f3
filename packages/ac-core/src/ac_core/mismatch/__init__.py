"""A recompute that differs from its forward: noticed at no cost, then traced to the call, the line and the cause."""
