"""The noise scale of a training, measured in its windows."""
