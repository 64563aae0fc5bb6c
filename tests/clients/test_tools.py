"""Calls of tools, by a model whose template knows none: they are told in its instructions, and held to their schemas."""

import json

import openai
import pytest

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 20},
                "unit": {"enum": ["celsius", "fahrenheit"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 7},
            },
            "required": ["city", "unit", "days"],
            "additionalProperties": False,
        },
    },
}
LIGHT = {
    "type": "function",
    "function": {
        "name": "turn_light",
        "parameters": {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"], "additionalProperties": False},
    },
}
QUESTION = "What is the weather in Rome?"
CALL = {"tools": [WEATHER, LIGHT], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 200}


def check(name, arguments):
    """An independent reading of the two schemas."""
    said = json.loads(arguments)
    if name == "turn_light":
        assert set(said) == {"on"} and isinstance(said["on"], bool)
        return
    assert name == "get_weather" and set(said) == {"city", "unit", "days"}
    assert isinstance(said["city"], str) and len(said["city"]) <= 20
    assert said["unit"] in ("celsius", "fahrenheit")
    assert isinstance(said["days"], int) and 1 <= said["days"] <= 7


def streamed(stream):
    """Content, calls and finish reason of choice 0, put together as clients do."""
    content, calls, reason = "", [], None
    for chunk in stream:
        for choice in chunk.choices:
            content += choice.delta.content or ""
            reason = choice.finish_reason or reason
            for call in choice.delta.tool_calls or []:
                if call.id:
                    assert call.index == len(calls) and call.type == "function"
                    calls.append([call.function.name, ""])
                else:
                    assert call.function.name is None
                calls[call.index][1] += call.function.arguments or ""
    return content, [tuple(call) for call in calls], reason


def test_calls_are_valid_every_time(chat):
    names = set()
    # Choices have the seeds that follow the first one's: those of all are 0 to 99.
    for seed in range(0, 100, 8):
        for choice in chat(QUESTION, **CALL, temperature=1, seed=seed, n=min(8, 100 - seed)).choices:
            (call,) = choice.message.tool_calls
            assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
            assert len(call.id) == 9 and call.id.isalnum()
            check(call.function.name, call.function.arguments)
            names.add(call.function.name)
    assert names == {"get_weather", "turn_light"}


def test_a_named_tool_is_called(chat):
    choice = {"type": "function", "function": {"name": "turn_light"}}
    for answer in chat(QUESTION, **{**CALL, "tool_choice": choice}, temperature=1, seed=0, n=3).choices:
        assert [call.function.name for call in answer.message.tool_calls] == ["turn_light"]


def test_a_stream_tells_the_same_calls(chat):
    for seed in range(3):
        options = {**CALL, "parallel_tool_calls": True, "temperature": 1, "seed": seed, "max_tokens": 150}
        whole = chat(QUESTION, **options).choices[0]
        calls = [(call.function.name, call.function.arguments) for call in whole.message.tool_calls]
        expected = (whole.message.content or "", calls, whole.finish_reason)
        assert streamed(chat(QUESTION, **options, stream=True)) == expected


def test_a_choice_of_auto_leaves_text_free(chat):
    answer = chat("Say hello.", tools=[LIGHT], max_tokens=12).choices[0]
    assert answer.finish_reason in ("stop", "length") and answer.message.content


def test_none_offers_no_tools(chat):
    with_tools = chat(QUESTION, tools=[WEATHER], tool_choice="none")
    without = chat(QUESTION)
    assert with_tools.choices[0].message.content == without.choices[0].message.content
    assert with_tools.usage.prompt_tokens == without.usage.prompt_tokens


def test_a_conversation_goes_on_with_results(client, model):
    call = {"id": "call_of_another_server", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
    messages = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "25 degrees, sunny"},
    ]
    answer = client.chat.completions.create(model=model, messages=messages, tools=[WEATHER], temperature=0, max_tokens=16)
    without = client.chat.completions.create(model=model, messages=messages[:1], temperature=0, max_tokens=16)
    assert answer.choices[0].message.content
    assert answer.usage.prompt_tokens > without.usage.prompt_tokens + 50


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "no spaces"}}]}, "tools[0].function.name"),
        ({"tools": [LIGHT, LIGHT]}, "tools"),
        ({"tools": [LIGHT], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}}}]}, "tools"),
    ],
)
def test_wrong_tools_are_refused_by_name(chat, options, param):
    with pytest.raises(openai.BadRequestError) as caught:
        chat(QUESTION, **options)
    assert caught.value.param == param
