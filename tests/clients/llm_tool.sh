#!/bin/sh
# Simon Willison's `llm` against a running server: llm_tool.sh http://127.0.0.1:8000/v1 KEY MODEL
set -eu
LLM_USER_PATH=$(mktemp -d); export LLM_USER_PATH
printf -- '- model_id: local\n  model_name: %s\n  api_base: %s\n  api_key_name: local\n  supports_schema: true\n  supports_tools: true\n' "$3" "$1" > "$LLM_USER_PATH/extra-openai-models.yaml"
llm keys set local --value "$2"
llm -m local -o max_tokens 24 -o seed 1 'def parse(self, text):'
llm -m local -o max_tokens 24 -o seed 1 --no-stream 'def parse(self, text):'
llm -m local -o max_tokens 300 -o seed 1 --no-stream --schema 'age int, height int' 'class Person:' | python3 -c 'import json,sys; print(json.load(sys.stdin))'
rm -r "$LLM_USER_PATH"
echo "llm passed"
