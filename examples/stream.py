"""Show tokens as they are written, and which of them were drafted."""

from paceline import LLM

llm = LLM("demo")
for delta in llm.stream("class Stack:\n", llm.params(max_tokens=48, temperature=0.7, seed=1)):
    print(delta.text, end="", flush=True)
    if delta.finish_reason is not None and delta.stats is not None:
        print(
            f"\n[{delta.finish_reason}: kept {delta.stats.accepted} of {delta.stats.drafted} drafted tokens]"
        )
