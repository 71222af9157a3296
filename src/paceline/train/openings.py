"""How user turns begin: the target is given one of these and writes the rest of the turn, then the answer."""

# ruff: noqa: E501

from __future__ import annotations

import random

TOPICS = """photosynthesis|the French Revolution|black holes|sourdough bread|a vegetable garden|learning the guitar|
compound interest|climate change|the human heart|vaccines|the Roman Empire|jazz|running a marathon|a job interview|
public speaking|machine learning|databases|a small business|the water cycle|volcanoes|bees|electric cars|solar power|
the stock market|a monthly budget|sleep|meditation|back pain|a healthy breakfast|houseplants|dogs|cats|parrots|
the Moon|Mars|the ocean|coral reefs|earthquakes|ancient Egypt|the Silk Road|World War II|democracy|the printing press|
Shakespeare|poetry|a short film|photography|watercolour|chess|football|swimming|yoga|camping|a trip to Japan|Paris|
the Amazon rainforest|a cabin in the woods|a lighthouse keeper|a lost letter|a robot who dreams|a dragon|time travel|
friendship|my neighbour|my manager|a difficult customer|a wedding|a birthday party|a school project|homework|exams|
time management|procrastination|remote work|an online course|a cover letter|a resignation letter|a complaint|a refund|
a broken laptop|a slow computer|passwords|privacy|social media|mobile phones|the internet|encryption|a web page|
sorting a list|prime numbers|fractions|probability|triangles|speed and distance|percentages|unit conversion|gravity|
magnets|atoms|acids and bases|DNA|evolution|bacteria|the immune system|nutrition|coffee|tea|chocolate|pasta|soup|
a vegetarian dinner|allergies|first aid|moving house|renting a flat|buying a used car|bicycles|trains|airports|
recycling|plastic waste|forests|rivers|weather|winter|spring|music theory|the piano|opera|cinema|novels|libraries|
museums|architecture|bridges|engines|rockets|satellites|telescopes|clocks|calendars|languages|Spanish|grammar|
metaphors|ethics|happiness|stress|grief|confidence|leadership|teamwork|negotiation|marketing|a logo|a start-up|
taxes|insurance|retirement|inflation|trade|farming|fishing|knitting|woodworking|painting a room|cleaning|minimalism|
parenting|toddlers|teenagers|grandparents|volunteering|charity|travel on a budget|hiking boots|maps|the desert|
penguins|whales|wolves|spiders|butterflies|dinosaurs|fossils|gold|salt|glass|paper|cotton|perfume|money""".replace(
    "\n", ""
).split("|")

QUESTIONS = """What is|What are the main|What causes|What would happen if|What's the difference between|What is the best way to|
Why do|Why is|Why does|How do I|How does|How can I|How would you explain {} to|How many|How long does|When did|When should I|
Where can|Who was|Who invented|Which is better,|Is it true that|Is it safe to|Can you explain|Can you tell me about {}|
Could you help me with {}|Do you think|Does|Are there any|Should I|I've always wondered why|What do you know about {}|
I'm curious about {}.|Tell me about {}|In simple terms, what|Explain {}|Explain why|Describe|Compare {} and""".replace(
    "\n", ""
).split("|")

TASKS = """Write a short story about {}|Write a poem about {}|Write a haiku about|Write a letter to|Write an email to my|
Write an email about {}|Write a paragraph about {}|Write a dialogue between|Write a product description for|Write a speech about {}|
Write a blog post about {}|Write three tips for|Write the opening of a novel about {}|Write a review of|Continue this story: |
Give me five|Give me a list of|Give an example of|List the steps to|List ten|Suggest|Recommend|Create a plan for|
Create a weekly schedule for|Make a shopping list for|Make a quiz about {}|Plan a|Brainstorm ideas for {}|Come up with names for|
Design a|Outline an essay about {}|Help me write|Help me plan|Help me understand {}|Generate a|Pretend you are|Imagine that|
Act as|You are a teacher. Explain {}|Translate the following sentence into|Define the word|Classify the following|
Answer the following question: |Complete the sentence: |Find the synonyms of|Argue for and against {}""".replace(
    "\n", ""
).split("|")

CODE = """Write a Python function that|Write a Python function to|Write a Python program that|Write a Python class for|
Write a function in JavaScript that|Write a SQL query that|Write an HTML page with|Write a bash script that|Write a regular expression that|
What does this Python code do?\n\n```python\n|Find the bug in this code:\n\n```python\n|Explain this code:\n\n```python\ndef |
Convert this Python code to JavaScript:\n\n```python\n|Add comments to this function:\n\n```python\ndef |How do I read a file in Python|
How do I sort a|What is a|Solve this problem step by step: |Calculate|If a train|A shop sells|Maria has|Tom buys|What is the sum of|
Solve for x: |What is 12|A rectangle has""".replace("|\n", "|").split("|")

REWRITES = """Rewrite the following text so that it is friendlier:\n\n|Rewrite this paragraph in simpler words:\n\n|
Rewrite this email so that it is more polite:\n\n|Make this text shorter:\n\n|Fix the grammar in this text:\n\n|
Rewrite this in the past tense:\n\n|Make this more formal:\n\n|Correct the spelling mistakes:\n\n|Rephrase this:\n\n|
Rewrite the following story from the point of view of|Summarize the following article:\n\n|Summarize this text in one sentence:\n\n|
Summarise the paragraph below.\n\n|What are the key points of this text?\n\n|Extract the names from this text:\n\n|
Turn these notes into a paragraph:\n\n- |Turn this paragraph into a list:\n\n|Answer the question from the text.\n\nText: |
Edit this paragraph:\n\n|Improve this introduction:\n\n""".replace("|\n", "|").split("|")

TEXTS = """|The |Last week, |Dear |Hi |In recent years, |My |We |Many people |It was |On |There |A |When |Our |According to |
I |Scientists |Once upon a time, |{} |This """.replace("|\n", "|").split("|")

CHAT = """Hi|Hello|Hey, |Good morning|Hi there! |I |I'm |I feel |I need |I want to |I have a |I've been |I'm thinking about |
I'm trying to |I just |My |My friend |My son |My mother |My boss |We |Today |Yesterday, |Thanks|Please |Let's |So, |Okay, |
Do you |Are you |Can you |What do you think |Help! |Sometimes |I'm considering |I don't understand |I can't """.replace(
    "|\n", "|"
).split("|")

KINDS = {"question": 0.25, "task": 0.27, "code": 0.14, "rewrite": 0.16, "chat": 0.13, "free": 0.05}


def opening(rng: random.Random) -> tuple[str, str]:
    """A kind, and the first words of a user turn of that kind."""
    kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
    if kind == "free":
        return kind, ""
    text = rng.choice(
        {"question": QUESTIONS, "task": TASKS, "code": CODE, "rewrite": REWRITES, "chat": CHAT}[kind]
    )
    if kind == "rewrite" and text.endswith("\n"):
        text += rng.choice(TEXTS)
    topic = rng.choice(TOPICS)
    if "{}" in text:
        text = text.replace("{}", topic)
    elif kind in ("question", "task") and rng.random() < 0.35:
        text = f"{text} {topic}"
    return kind, text.rstrip(" ")
