"""instructor against a running server: python python_instructor.py http://127.0.0.1:8000/v1 KEY MODEL"""

import sys

import instructor
from openai import OpenAI
from pydantic import BaseModel, Field

base, key, model = sys.argv[1:4]


class Person(BaseModel):
    name: str = Field(max_length=12)
    age: int


for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS):
    client = instructor.from_openai(OpenAI(base_url=base, api_key=key), mode=mode)
    person = client.chat.completions.create(
        model=model, response_model=Person, messages=[{"role": "user", "content": "class Person:"}],
        max_tokens=300, max_retries=1, seed=2,
    )  # fmt: skip
    assert isinstance(person, Person)
    print(mode, person)
print("instructor passed")
