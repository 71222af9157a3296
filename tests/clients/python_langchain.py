"""langchain-openai against a running server: python python_langchain.py http://127.0.0.1:8000/v1 KEY MODEL"""

import sys
from typing import Literal

from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ConfigDict

base, key, model = sys.argv[1:4]


ADA = [("system", "Extract the name and the age."), ("user", "Write this as JSON: name Ada Lovelace, age 36")]


class Person(BaseModel):
    """A person."""

    model_config = ConfigDict(extra="forbid")

    name: Literal["Ada Lovelace", "Alan Turing"]
    age: int


chat = ChatOpenAI(model=model, base_url=base, api_key=key, max_tokens=200, temperature=0)
said = chat.invoke("What is the capital of Australia?").content
assert "Canberra" in said, said
assert "".join(part.content for part in chat.stream("What is the capital of Australia?")) == said
for method in ("json_schema", "function_calling"):
    person = chat.with_structured_output(Person, method=method).invoke(
        "Write this as JSON: name Ada Lovelace, age 36"
    )
    assert isinstance(person, Person)
    assert person.name == "Ada Lovelace", person  # a model of 135 million parameters may miss the age
    print(method, person)
print("langchain-openai passed:", said)
