"""Anthropic's API, by its own client."""

import anthropic
import pytest
from conftest import DEADLINE, KEY, MODEL, URL

QUESTION = [{"role": "user", "content": "Write one sentence about rivers."}]
# The client has no argument for it any more.
GREEDY = {"temperature": 0}
LIGHT = {
    "name": "turn_light",
    "description": "Turns a light on or off.",
    "input_schema": {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"], "additionalProperties": False},
}


@pytest.fixture
def claude():
    with anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0, timeout=DEADLINE) as client:
        yield client


def ask(claude, **options):
    return claude.messages.create(**{"model": MODEL, "max_tokens": 16, "extra_body": GREEDY, "messages": QUESTION, **options})


def test_a_message_is_what_a_chat_would_say(claude, chat):
    message = ask(claude, system="Answer in one sentence.")
    (block,) = message.content
    assert (message.role, message.stop_reason, block.type) == ("assistant", "max_tokens", "text")
    assert message.usage.output_tokens == 16
    plain = ask(claude)
    assert plain.content[0].text == chat(QUESTION[0]["content"], max_tokens=16).choices[0].message.content


def test_an_answer_begins_as_the_request_says(claude):
    message = ask(claude, messages=[*QUESTION, {"role": "assistant", "content": "Rivers are"}])
    (block,) = message.content
    assert block.text and not block.text.startswith("Rivers are")


def test_a_stream_adds_up_to_the_message(claude):
    whole = ask(claude, max_tokens=24)
    with claude.messages.stream(model=MODEL, max_tokens=24, extra_body=GREEDY, messages=QUESTION) as stream:
        kinds = {event.type for event in stream}
        streamed = stream.get_final_message()
    assert {"message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta", "message_stop"} <= kinds
    assert streamed.content[0].text == whole.content[0].text
    assert (streamed.stop_reason, streamed.usage.output_tokens) == (whole.stop_reason, 24)


def test_a_stop_sequence_is_named(claude):
    text = ask(claude, max_tokens=24).content[0].text
    message = ask(claude, max_tokens=24, stop_sequences=["never in there", text[8:11]])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", text[8:11])
    assert message.content[0].text == text[:8]


def test_tools_are_called_and_their_results_read(claude):
    options = {"tools": [LIGHT], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}, "max_tokens": 100, "extra_body": {"temperature": 1}}
    message = ask(claude, **options)
    call = message.content[-1]
    assert (message.stop_reason, call.type, call.name) == ("tool_use", "tool_use", "turn_light")
    assert set(call.input) == {"on"} and isinstance(call.input["on"], bool)
    with claude.messages.stream(model=MODEL, messages=QUESTION, **options) as stream:
        streamed = stream.get_final_message()
    assert streamed.content[-1].type == "tool_use" and isinstance(streamed.content[-1].input["on"], bool)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "done"}]}
    messages = [*QUESTION, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    answer = ask(claude, messages=messages, tools=[LIGHT])
    assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens > message.usage.input_tokens


def test_tokens_are_counted_without_an_answer(claude):
    counted = claude.messages.count_tokens(model=MODEL, messages=QUESTION, system="Be brief.")
    usage = ask(claude, system="Be brief.", max_tokens=1).usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_a_prompt_that_is_too_long_is_measured(claude):
    long = [{"role": "user", "content": "river " * 20_000}]
    counted = claude.messages.count_tokens(model=MODEL, messages=long).input_tokens
    assert counted > 20_000
    with pytest.raises(anthropic.BadRequestError) as caught:
        ask(claude, messages=long)
    error = caught.value.body["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"] == f"prompt is too long: {counted} tokens > 8192 maximum"


def test_errors_are_those_of_the_api(claude):
    with pytest.raises(anthropic.NotFoundError):
        ask(claude, model="claude")
    with pytest.raises(anthropic.BadRequestError) as caught:
        ask(claude, extra_body={"temperature": 9})
    assert caught.value.body["error"]["type"] == "invalid_request_error"
    assert "temperature" in caught.value.body["error"]["message"]
    with pytest.raises(anthropic.AuthenticationError):
        ask(claude.with_options(api_key="wrong"))
