"""Write a text and look at what speculation did."""

from paceline import LLM

llm = LLM("demo")  # or a folder, a GGUF file, a hub id
done = llm.generate("def fibonacci(n):\n", llm.params(max_tokens=64))[0]
print(done.text)
print(
    f"{done.stats.tokens_per_step:.2f} tokens per step, {done.stats.acceptance:.0%} of the drafted tokens were kept"
)

plain = llm.generate("def fibonacci(n):\n", llm.params(max_tokens=64, drafter="none"))[0]
assert plain.text == done.text  # the same text without a drafter
