"""OpenAI's responses: items in, items out, and conversations that are kept."""

import json

import openai
import pytest
from pydantic import BaseModel

QUESTION = "Write one sentence about rivers."
LIGHT = {
    "type": "function",
    "name": "turn_light",
    "strict": True,
    "parameters": {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"], "additionalProperties": False},
}


@pytest.fixture
def ask(client, model):
    def create(input, **options):
        return client.responses.create(**{"model": model, "input": input, "temperature": 0, "max_output_tokens": 16, **options})

    return create


def test_a_response_says_what_a_chat_says(ask, chat):
    response = ask(QUESTION)
    assert response.output_text == chat(QUESTION, max_tokens=16).choices[0].message.content
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.usage.output_tokens == 16


def test_a_stream_adds_up_to_the_response(client, ask, model):
    whole = ask(QUESTION)
    with client.responses.stream(model=model, input=QUESTION, temperature=0, max_output_tokens=16) as stream:
        events = list(stream)
    assert [event.sequence_number for event in events if hasattr(event, "sequence_number")] == sorted({event.sequence_number for event in events if hasattr(event, "sequence_number")})
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    assert events[0].type == "response.created" and events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == whole.output_text


def test_a_conversation_goes_on_by_its_id(ask, client):
    first = ask(QUESTION, instructions="Be brief.")
    named = ask("And one about lakes.", previous_response_id=first.id)
    sent = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": [{"type": "output_text", "text": first.output_text}]},
        {"role": "user", "content": [{"type": "input_text", "text": "And one about lakes."}]},
    ]
    assert named.output_text == ask(sent).output_text
    assert client.responses.retrieve(first.id).output_text == first.output_text
    with pytest.raises(openai.BadRequestError) as caught:
        ask("x", previous_response_id="resp_unknown")
    assert caught.value.param == "previous_response_id"
    gone = ask(QUESTION, store=False)
    with pytest.raises(openai.BadRequestError):
        ask("x", previous_response_id=gone.id)


def test_functions_are_called_and_answered(ask, client, model):
    options = {"tools": [LIGHT, {"type": "web_search"}], "tool_choice": "required", "parallel_tool_calls": False, "temperature": 1, "max_output_tokens": 100}
    response = ask("Turn the light on.", **options)
    call = response.output[-1]
    assert (response.status, call.type, call.name) == ("completed", "function_call", "turn_light")
    assert isinstance(json.loads(call.arguments)["on"], bool)
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
    following = ask([output], previous_response_id=response.id, tools=[LIGHT])
    assert following.usage.input_tokens > response.usage.input_tokens
    with client.responses.stream(model=model, input="Turn the light on.", **options) as stream:
        streamed = stream.get_final_response()
    assert isinstance(json.loads(streamed.output[-1].arguments)["on"], bool)


def test_parse_returns_an_object_of_the_class(client, model):
    class River(BaseModel):
        long: bool

    response = client.responses.parse(model=model, input=QUESTION, text_format=River, temperature=1, max_output_tokens=100)
    assert isinstance(response.output_parsed, River)
