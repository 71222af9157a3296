"""langchain-openai against a running server: python python_langchain.py http://127.0.0.1:8000/v1 KEY MODEL"""

import sys

from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

base, key, model = sys.argv[1:4]


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=12)
    age: int


chat = ChatOpenAI(model=model, base_url=base, api_key=key, max_tokens=200, seed=1, temperature=0.5)
print("invoke", len(chat.invoke("def parse(self):").content))
print("stream", sum(1 for _ in chat.stream("def parse(self):")))
for method in ("json_schema", "function_calling"):
    person = chat.with_structured_output(Person, method=method).invoke("class Person:")
    assert isinstance(person, Person)
    print(method, person)
print("langchain-openai passed")
