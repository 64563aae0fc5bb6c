"""Ollama's API, by its own client."""

import json

import ollama
import pytest
from conftest import DEADLINE, KEY, MODEL, URL

QUESTION = [{"role": "user", "content": "Write one sentence about rivers."}]
GREEDY = {"temperature": 0, "num_predict": 16}


def turn_light(on: bool) -> str:
    """Turn the light on or off.

    Args:
        on: whether it shines
    """
    return f"the light is {on}"


@pytest.fixture
def client():
    return ollama.Client(host=URL, headers={"Authorization": f"Bearer {KEY}"}, timeout=DEADLINE)


def test_a_chat_says_the_same_whole_and_streamed(client):
    whole = client.chat(MODEL, QUESTION, options=GREEDY)
    assert whole.message.content and (whole.done, whole.done_reason, whole.eval_count) == (True, "length", 16)
    *lines, last = client.chat(f"{MODEL}:latest", QUESTION, options=GREEDY, stream=True)
    assert "".join(line.message.content for line in lines) == whole.message.content
    assert (last.done, last.done_reason, last.eval_count) == (True, "length", 16)
    assert all(not line.done for line in lines)


def test_the_model_is_loaded_and_unloaded_by_asking_nothing(client):
    loaded, unloaded = client.generate(MODEL), client.generate(MODEL, keep_alive=0)
    assert (loaded.done, loaded.done_reason, loaded.response) == (True, "load", "")
    assert (unloaded.done, unloaded.done_reason) == (True, "unload")
    chat = client.chat(MODEL, [], keep_alive="0s")
    assert (chat.done, chat.done_reason, chat.message.content) == (True, "unload", "")
    # It is there all the same.
    assert client.generate(MODEL, "Rivers are", options=GREEDY).response


def test_generate_is_a_chat_of_one_message(client):
    chat = client.chat(MODEL, QUESTION, options=GREEDY)
    generated = client.generate(MODEL, QUESTION[0]["content"], options=GREEDY)
    assert generated.response == chat.message.content
    streamed = client.generate(MODEL, QUESTION[0]["content"], options=GREEDY, stream=True)
    assert "".join(line.response for line in streamed) == generated.response


def test_the_answer_keeps_to_a_format(client):
    schema = {"type": "object", "properties": {"river": {"enum": ["Nile", "Rhine"]}}, "required": ["river"], "additionalProperties": False}
    answer = client.chat(MODEL, QUESTION, format=schema, options={"temperature": 1})
    assert json.loads(answer.message.content)["river"] in ("Nile", "Rhine")
    answer = client.generate(MODEL, "Describe a river as JSON.", format="json", options={"temperature": 0, "num_predict": 300})
    assert answer.done_reason == "length" or isinstance(json.loads(answer.response), dict)


def test_tools_come_through(client):
    ask = {"tools": [turn_light], "options": {"temperature": 0, "num_predict": 60}}
    answer = client.chat(MODEL, [{"role": "user", "content": "Turn the light on."}], **ask)
    for call in answer.message.tool_calls or []:
        assert call.function.name == "turn_light" and set(call.function.arguments) <= {"on"}
    messages = [
        {"role": "user", "content": "Turn the light on."},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "turn_light", "arguments": {"on": True}}}]},
        {"role": "tool", "tool_name": "turn_light", "content": turn_light(True)},
    ]
    assert client.chat(MODEL, messages, **ask).prompt_eval_count > answer.prompt_eval_count


def test_the_model_is_listed_and_shown(client):
    assert [model.model for model in client.list().models] == [MODEL]
    assert [model.model for model in client.ps().models] == [MODEL]
    assert "tools" in client.show(MODEL).capabilities


def test_an_answer_goes_on_with_what_was_said(client):
    messages = [*QUESTION, {"role": "assistant", "content": "Rivers are"}]
    answer = client.chat(MODEL, messages, options=GREEDY).message.content
    assert answer and not answer.startswith("Rivers are")
    # An older route of embeddings.
    assert client.embeddings(MODEL, "a").embedding == pytest.approx(client.embed(MODEL, "a").embeddings[0], abs=1e-6)


def test_errors_say_what_is_wrong(client):
    with pytest.raises(ollama.ResponseError) as caught:
        client.chat("llama3.2", QUESTION)
    assert caught.value.status_code == 404 and "llama3.2" in caught.value.error
    with pytest.raises(ollama.ResponseError) as caught:
        client.chat(MODEL, QUESTION, options={"temperature": 9})
    assert caught.value.status_code == 400 and "temperature" in caught.value.error
    with pytest.raises(ollama.ResponseError) as caught:
        ollama.Client(host=URL, timeout=DEADLINE).chat(MODEL, QUESTION)
    assert caught.value.status_code == 401 and "API key" in caught.value.error
