"""The end of all ranks after an exception on one of them."""
