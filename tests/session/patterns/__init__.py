"""What people do in loops of their own: short functions that train the same in one process and on ranks."""
