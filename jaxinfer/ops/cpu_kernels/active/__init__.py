"""Products that read only the weights of features that are not zero, with the bits of those that read all."""
