"""Answers by JSON schemas of all kinds, checked by a validator that knows nothing of how they were made."""

import json
from pathlib import Path

import jsonschema
import openai
import pytest

# Answers by the same schemas are also drawn without a model, many more (tests/tests/text_json_schema_suite.rs).
SCHEMAS = json.loads(Path(__file__).with_name("schemas.json").read_text())
# What cannot be kept to token by token, and what the refusal must name.
REFUSED = {
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "contains": {"type": "array", "contains": {"type": "integer"}},
    "propertyNames": {"type": "object", "propertyNames": {"maxLength": 3}},
    "if": {"type": "object", "if": {"required": ["a"]}, "then": {"required": ["b"]}},
    "not": {"not": {"type": "string"}},
    "oneOf": {"oneOf": [{"type": "integer"}, {"minimum": 2}]},
    "$ref": {"$ref": "https://example.com/other.json"},
}


def answers(chat, schema, **options):
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    options = {"temperature": 1, "max_tokens": 200, **options}
    return chat("Say something as JSON.", response_format=form, **options).choices


def test_answers_are_valid(chat):
    ended = dict.fromkeys(SCHEMAS, 0)
    for name, schema in SCHEMAS.items():
        validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
        # Choices of a request have the seeds that follow its own.
        for choice in answers(chat, schema, n=8, seed=0):
            # Some come to their last token before they come to an end.
            if choice.finish_reason == "stop":
                validator.validate(json.loads(choice.message.content))
                ended[name] += 1
    assert sum(ended.values()) >= 100 and min(ended.values()) >= 2, ended


@pytest.mark.parametrize("keyword", REFUSED)
def test_what_cannot_be_kept_to_is_refused_by_name(chat, keyword):
    with pytest.raises(openai.BadRequestError) as caught:
        answers(chat, REFUSED[keyword])
    assert keyword in caught.value.message and caught.value.param == "response_format"
