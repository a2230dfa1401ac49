"""Drop-in callbacks: what a self-supervised run learns, and why, at any number of ranks."""
