"""Measures what a model says of texts and answers of tasks, with its weights as they are and in fewer bits."""
