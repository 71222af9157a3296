#!/bin/sh
# Simon Willison's `llm` against a running server: llm_tool.sh http://127.0.0.1:8000/v1 KEY MODEL
set -eu
LLM_USER_PATH=$(mktemp -d); export LLM_USER_PATH
printf -- '- model_id: local\n  model_name: %s\n  api_base: %s\n  api_key_name: local\n  supports_schema: true\n  supports_tools: true\n' "$3" "$1" > "$LLM_USER_PATH/extra-openai-models.yaml"
llm keys set local --value "$2"
llm -m local -o max_tokens 40 -o temperature 0 'What is the capital of Australia?' | tee /dev/stderr | grep -q Canberra
llm -m local -o max_tokens 40 -o temperature 0 --no-stream 'What is the capital of Australia?' | grep -q Canberra
llm -m local -o max_tokens 300 -o temperature 0 --no-stream -s 'Extract the name and the age.' --schema '{"type": "object", "properties": {"name": {"enum": ["Ada Lovelace", "Alan Turing"]}, "age": {"type": "integer"}}, "required": ["name", "age"], "additionalProperties": false}' 'Write this as JSON: name Ada Lovelace, age 36' |
  python3 -c 'import json,sys; found = json.load(sys.stdin); print(found); assert found == {"name": "Ada Lovelace", "age": 36}'
rm -r "$LLM_USER_PATH"
echo "llm passed"
