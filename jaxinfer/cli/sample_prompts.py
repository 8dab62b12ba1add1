"""Prompts for measurements and audits where the user gives none: prose, code, lists, speech, and text that repeats."""

SAMPLE_PROMPTS = (
    "Once upon a time, in a village by the sea, there lived",
    "The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is",
    "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n    return a - b\n\n\ndef multiply(a, b):\n",
    '"Where are you going?" asked the fox. "To the river," said the heron. "Where is the river?" asked the fox. "',
    "Shopping list:\n1. bread\n2. butter\n3. milk\n4. eggs\n5.",
)
