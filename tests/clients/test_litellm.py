"""LiteLLM, which speaks OpenAI's, Anthropic's and Ollama's API."""

import json

import litellm
import pytest
from conftest import DEADLINE, KEY, MODEL, URL

QUESTION = [{"role": "user", "content": "Write one sentence about rivers."}]
LIGHT = {
    "type": "function",
    "function": {
        "name": "turn_light",
        "parameters": {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"], "additionalProperties": False},
    },
}
# How LiteLLM names an API, and where it is.
APIS = [("openai", f"{URL}/v1"), ("anthropic", URL), ("ollama_chat", URL)]


@pytest.fixture(params=APIS, ids=[name for name, _ in APIS])
def ask(request):
    name, base = request.param

    def completion(messages=QUESTION, **options):
        options = {"temperature": 0, "max_tokens": 16, "timeout": DEADLINE, "num_retries": 0, **options}
        return litellm.completion(model=f"{name}/{MODEL}", api_base=base, api_key=KEY, messages=messages, **options)

    return completion


def test_every_api_says_the_same_whole_and_streamed(ask, chat):
    whole = ask().choices[0]
    assert whole.message.content == chat(QUESTION[0]["content"], max_tokens=16).choices[0].message.content
    chunks = ask(stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.message.content


def test_tools_are_called_and_their_results_sent_back(ask):
    messages = [{"role": "user", "content": "Turn the light on."}]
    # Nothing asks for a call, so none may come; one that the limit cuts off has no arguments.
    for call in ask(messages, tools=[LIGHT]).choices[0].message.tool_calls or []:
        assert call.function.name == "turn_light" and set(json.loads(call.function.arguments)) <= {"on"}
    call = {"id": "call_1", "type": "function", "function": {"name": "turn_light", "arguments": '{"on": true}'}}
    result = {"role": "tool", "tool_call_id": "call_1", "name": "turn_light", "content": "the light is on"}
    messages += [{"role": "assistant", "content": "", "tool_calls": [call]}, result]
    after = ask(messages, tools=[LIGHT])
    # LiteLLM tells Ollama's API of no calls in earlier turns, after which a model may say nothing.
    assert after.choices[0].finish_reason in ("stop", "length") and after.usage.prompt_tokens > 100


@pytest.mark.parametrize(("name", "base"), APIS[:2])
def test_a_required_call_comes(name, base):
    options = {"tools": [LIGHT], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 100, "temperature": 1}
    answer = litellm.completion(model=f"{name}/{MODEL}", api_base=base, api_key=KEY, messages=QUESTION, timeout=DEADLINE, **options)
    (call,) = answer.choices[0].message.tool_calls
    assert answer.choices[0].finish_reason == "tool_calls"
    assert call.function.name == "turn_light" and isinstance(json.loads(call.function.arguments)["on"], bool)


def test_embeddings_are_those_of_openai(client, model):
    answer = litellm.embedding(model=f"openai/{MODEL}", api_base=f"{URL}/v1", api_key=KEY, input=["a river"], encoding_format="float", timeout=DEADLINE)
    own = client.embeddings.create(model=model, input=["a river"]).data[0].embedding
    assert answer.data[0]["embedding"] == pytest.approx(own, abs=1e-6)
