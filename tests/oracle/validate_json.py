"""The oracle of answers by JSON schemas: what a validator says of them that knows nothing of how they were made.

Reads {name: {"schema": schema, "answers": [text]}} from standard input, and writes a list of what is wrong, in words, to standard output.
"""

import json
import sys

import jsonschema

wrong = []
for name, given in json.load(sys.stdin).items():
    validator = jsonschema.Draft202012Validator(given["schema"], format_checker=jsonschema.FormatChecker())
    for answer in given["answers"]:
        try:
            validator.validate(json.loads(answer))
        except (ValueError, jsonschema.ValidationError) as error:
            wrong.append(f"{name}: {answer!r}: {error}")
json.dump(wrong, sys.stdout)
