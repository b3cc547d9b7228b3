"""How large windows become while training goes on: the schedule and its steps."""
