"""What a user puts on a module or a trainer: the mixin and the callback."""
