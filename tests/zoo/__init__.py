"""What tests train, and what watches a training: modules, nets, rows, callbacks."""
