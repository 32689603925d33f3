"""How tokens reach the ranks of their experts and come back."""
