"""The twelve questions of the measurements on real models: six ask for code, six for talk."""

CODE = (
    "Write a Python function that merges two sorted lists into one sorted list. Add a docstring and type hints.",
    "Write a Python class LRUCache with get and put that both run in constant time.",
    "Write a SQL query that gives the three customers with the highest total of orders in 2023, with their names.",
    "Write a C function that reverses a singly linked list in place, and a main that shows it.",
    "Write a JavaScript function debounce(f, wait) and explain in one sentence what it does.",
    "Write pytest tests for a function slugify(text) that lowers the text and replaces spaces by hyphens.",
)
TALK = (
    "Explain in a few sentences why the sky is blue and why sunsets are red.",
    "What should I think about before I adopt a dog? I live in a small flat in the city.",
    "Write a short letter to a neighbour to apologise for the noise of last night's party.",
    "What were the main causes of the French Revolution?",
    "Tell me a short story about a lighthouse keeper who finds a message in a bottle.",
    "How do vaccines train the immune system? Explain it to a twelve-year-old.",
)
QUESTIONS = tuple([("code", text) for text in CODE] + [("talk", text) for text in TALK])
