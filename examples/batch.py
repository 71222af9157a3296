"""Many prompts at once, each with parameters of its own. A seed gives the same text alone and in any batch."""

from paceline import LLM

llm = LLM("demo")
prompts = ["import os\n", "def add(a, b):\n", "class Node:\n", "for i in range("]
params = [llm.params(max_tokens=24, temperature=0.8, seed=seed) for seed in range(len(prompts))]
together = llm.generate(prompts, params)
for prompt, done in zip(prompts, together, strict=True):
    print(repr(prompt + done.text))

alone = llm.generate(prompts[2], params[2])[0]
assert alone.text == together[2].text
