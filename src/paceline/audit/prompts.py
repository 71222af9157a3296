"""What an audit asks for: plain prose, code, lists, other languages. Short, so that every server can answer."""

PROMPTS = (
    "The capital of Australia is",
    "Q: Why is the sky blue?\nA:",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a small village by the sea,",
    "List the planets of the solar system:\n1. Mercury\n2.",
    "Translate to French: The cat sleeps on the chair.\nFrench:",
    "import json\n\ndef read_config(path):\n",
    "The three distributions of thermodynamics are",
    "Dear Sir or Madam,\n\nI am writing to",
    '{"name": "Ada", "born": 1815, "known_for": [',
    "Zutaten für einen Apfelkuchen:\n-",
    "SELECT name, COUNT(*) FROM orders",
    "A haiku about autumn:\n",
    "日本の首都は",
    "Step by step: 17 * 24 =",
    "for i in range(10):\n    print(i)\nfor i in range(10):\n",
    "In 1969, humans first",
    "The difference between a list and a tuple in Python is",
    "<ul>\n  <li>One</li>\n  <li>Two</li>\n",
    "To be, or not to be,",
)

QUESTIONS = (
    "What is in this picture?",
    "Which colours does it have, from the top to the bottom?",
)  # of a picture

# Sampled texts: every second token is one of three or four, and both networks and n-gram lookup draft here.
SAMPLED = "red, green, blue, red, blue, green, red, green, blue, green, red, blue, red, green,"
