"""A model whose feed-forward layers have ReLU, trained to say what it said with its own activation."""
