"""What developers run by hand: benchmarks, checks on a GPU."""
