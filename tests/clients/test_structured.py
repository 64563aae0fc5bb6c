"""Answers of a given form: JSON by a schema, grammars, regular expressions."""

import json
import re

import openai
import pytest
from pydantic import BaseModel, Field

QUESTION = "Tell me about a city."


class City(BaseModel):
    name: str = Field(max_length=30)
    country: str = Field(max_length=30)
    inhabitants: int = Field(ge=0, le=40_000_000)
    rivers: list[str] = Field(max_length=3)


def test_parse_returns_an_object_of_the_class(client, model):
    # Choices have the seeds that follow the first one's. The client refuses an answer of which one did not come to its end.
    answer = client.chat.completions.parse(
        model=model,
        messages=[{"role": "user", "content": QUESTION}],
        response_format=City,
        temperature=1,
        seed=0,
        n=8,
        max_tokens=400,
    )
    assert len(answer.choices) == 8
    for choice in answer.choices:
        assert isinstance(choice.message.parsed, City)
        assert City.model_validate_json(choice.message.content) == choice.message.parsed


def test_json_object_is_any_object(chat):
    answer = chat(QUESTION + " Answer in JSON.", response_format={"type": "json_object"}, max_tokens=300, temperature=1, n=8)
    ended = [choice for choice in answer.choices if choice.finish_reason == "stop"]
    assert ended
    for choice in ended:
        assert isinstance(json.loads(choice.message.content), dict)


def test_with_n_logprobs_and_a_stream_the_form_is_kept(chat):
    schema = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo", "Lima"]}, "old": {"type": "boolean"}}, "required": ["city", "old"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema, "strict": True}}
    options = {"response_format": form, "n": 3, "temperature": 1.5, "seed": 7, "logprobs": True, "top_logprobs": 2, "max_tokens": 60}
    whole = chat(QUESTION, **options)
    texts = [choice.message.content for choice in whole.choices]
    for choice in whole.choices:
        said = json.loads(choice.message.content)
        assert set(said) == {"city", "old"} and said["city"] in ("Rome", "Oslo", "Lima")
        # The model's own logprobs, whatever the form ruled out.
        assert choice.logprobs.content and all(token.logprob <= 0 for token in choice.logprobs.content)
        assert "".join(token.token for token in choice.logprobs.content) == choice.message.content
    streamed = [""] * 3
    for chunk in chat(QUESTION, **options, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"regex": r"[A-Z][a-z]{2,9}, [0-9]{4}"}, r"[A-Z][a-z]{2,9}, [0-9]{4}"),
        ({"grammar": 'root ::= "I " verb " " [a-z]{3,8} "."\nverb ::= "like" | "hate"'}, r"I (like|hate) [a-z]{3,8}\."),
        ({"grammar": 'start: "I " VERB /[a-z]{3,8}/\nVERB: "like " | "hate "'}, r"I (like|hate) [a-z]{3,8}"),
    ],
)
def test_grammars_are_kept(chat, client, model, form, pattern):
    answer = chat(QUESTION, extra_body=form, temperature=1, seed=1)
    assert answer.choices[0].finish_reason == "stop"
    assert re.fullmatch(pattern, answer.choices[0].message.content)
    completion = client.completions.create(model=model, prompt="Once", extra_body=form, temperature=1, seed=2, max_tokens=40)
    assert re.fullmatch(pattern, completion.choices[0].text)


@pytest.mark.parametrize(
    ("form", "says"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "array", "uniqueItems": True}}}}, "uniqueItems"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "schema"),
        ({"response_format": {"type": "yaml"}}, "json_schema"),
        ({"extra_body": {"grammar": 'root ::= "a'}}, "line 1"),
        ({"extra_body": {"grammar": "start: missing"}}, "missing"),
        ({"extra_body": {"regex": "("}}, "regex"),
        ({"extra_body": {"regex": "a", "grammar": 'start: "a"'}}, "two forms"),
    ],
)
def test_a_form_that_cannot_be_kept_is_refused(chat, form, says):
    with pytest.raises(openai.BadRequestError) as caught:
        chat(QUESTION, **form)
    assert says in caught.value.message
