"""instructor against a running server: python python_instructor.py http://127.0.0.1:8000/v1 KEY MODEL"""

import sys
from typing import Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel, ConfigDict

base, key, model = sys.argv[1:4]


class Person(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: Literal["Ada Lovelace", "Alan Turing"]
    age: int


for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS):
    client = instructor.from_openai(OpenAI(base_url=base, api_key=key), mode=mode)
    person = client.chat.completions.create(
        model=model, response_model=Person, max_tokens=300, max_retries=1, temperature=0,
        messages=[{"role": "system", "content": "Extract the name and the age."},
                  {"role": "user", "content": "Write this as JSON: name Ada Lovelace, age 36"}],
    )  # fmt: skip
    assert (person.name, person.age) == ("Ada Lovelace", 36), person
    print(mode, person)
print("instructor passed")
