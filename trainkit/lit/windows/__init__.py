"""Windows of several loader batches: weighed as they come, divided once at the end."""
