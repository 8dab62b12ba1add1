"""Facts found again in long texts, by how much of the text a query reads."""
