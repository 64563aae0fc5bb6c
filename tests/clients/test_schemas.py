"""Answers by JSON schemas of all kinds, checked by a validator that knows nothing of how they were made."""

import json

import jsonschema
import openai
import pytest

SCHEMAS = {
    "enum": {"enum": ["a", 1, None, {"b": [True]}]},
    "const": {"type": "object", "properties": {"kind": {"const": "x"}}, "required": ["kind"], "additionalProperties": False},
    "numbers": {"type": "array", "items": {"type": "number", "minimum": -5, "exclusiveMaximum": 5.5}, "minItems": 2, "maxItems": 3},
    "integers": {"type": "array", "items": {"type": "integer", "minimum": 7, "maximum": 1000, "multipleOf": 7}, "maxItems": 3},
    "strings": {"type": "object", "properties": {"short": {"type": "string", "minLength": 2, "maxLength": 5}, "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}}, "required": ["short", "code"], "additionalProperties": False},
    "formats": {"type": "object", "properties": {"day": {"type": "string", "format": "date"}, "moment": {"type": "string", "format": "date-time"}, "at": {"type": "string", "format": "ipv4"}, "id": {"type": "string", "format": "uuid"}}, "required": ["day", "moment", "at", "id"], "additionalProperties": False},
    "optional": {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"type": "null"}, "c": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["c"], "additionalProperties": False},
    "anyOf": {"anyOf": [{"type": "integer", "maximum": 100, "minimum": 0}, {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}]},
    "allOf": {"allOf": [{"type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 50}}, "required": ["a"]}, {"type": "object", "properties": {"b": {"type": "boolean"}}, "required": ["b"]}], "additionalProperties": True, "maxProperties": 4},
    "types": {"type": ["boolean", "null"]},
    "tuple": {"type": "array", "prefixItems": [{"type": "boolean"}, {"enum": ["x", "y"]}], "items": False, "minItems": 2},
    "nested": {"type": "object", "properties": {"point": {"$ref": "#/$defs/point"}}, "required": ["point"], "additionalProperties": False, "$defs": {"point": {"type": "object", "properties": {"x": {"type": "integer", "minimum": -9, "maximum": 9}, "y": {"type": "integer", "minimum": -9, "maximum": 9}}, "required": ["x", "y"], "additionalProperties": False}}},
    "tree": {"$ref": "#/$defs/node", "$defs": {"node": {"type": "object", "properties": {"leaf": {"type": "boolean"}, "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 1}}, "required": ["leaf", "children"], "additionalProperties": False}}},
    "words": {"type": "object", "patternProperties": {"^[a-c]$": {"type": "boolean"}}, "additionalProperties": False, "minProperties": 1, "maxProperties": 2},
}
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
    options = {"temperature": 1, "max_tokens": 120, **options}
    return chat("Say something as JSON.", response_format=form, **options).choices


def test_500_answers_are_valid(chat):
    ended = dict.fromkeys(SCHEMAS, 0)
    for name, schema in SCHEMAS.items():
        validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
        # Choices of a request have the seeds that follow its own.
        for seed in range(0, 40, 8):
            for choice in answers(chat, schema, n=8, seed=seed):
                # Some come to their last token before they come to an end.
                if choice.finish_reason == "stop":
                    validator.validate(json.loads(choice.message.content))
                    ended[name] += 1
    assert sum(ended.values()) >= 500 and min(ended.values()) >= 10, ended


@pytest.mark.parametrize("keyword", REFUSED)
def test_what_cannot_be_kept_to_is_refused_by_name(chat, keyword):
    with pytest.raises(openai.BadRequestError) as caught:
        answers(chat, REFUSED[keyword])
    assert keyword in caught.value.message and caught.value.param == "response_format"
