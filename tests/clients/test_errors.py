"""What the client raises for what the server refuses."""

import openai
import pytest

from conftest import DEADLINE, KEY, MODEL, URL, metrics

HELLO = [{"role": "user", "content": "hello"}]


def raised(error, client, **options):
    with pytest.raises(error) as caught:
        client.chat.completions.create(**{"model": MODEL, "messages": HELLO, "max_tokens": 1, **options})
    return caught.value


def test_bad_requests_name_the_parameter(client):
    for param, options in [
        ("temperature", {"temperature": 5}),
        ("n", {"n": 0}),
        ("messages", {"messages": []}),
        ("messages[0].role", {"messages": [{"role": "robot", "content": "hello"}]}),
        ("messages[0].content[0].type", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
        ("top_logprobs", {"logprobs": True, "top_logprobs": 99}),
        ("stop", {"stop": [""]}),
        ("logit_bias", {"logit_bias": {"99999999": 1}}),
    ]:
        error = raised(openai.BadRequestError, client, **options)
        assert (error.param, error.type) == (param, "invalid_request_error")


def test_the_key_is_asked_for():
    with openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY + "x", max_retries=0, timeout=DEADLINE) as stranger:
        assert raised(openai.AuthenticationError, stranger).code == "invalid_api_key"
        with pytest.raises(openai.AuthenticationError):
            stranger.models.list()


def test_unknown_models_are_not_found(client):
    assert raised(openai.NotFoundError, client, model="gpt-4o").code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4o")


def test_a_prompt_past_the_context_is_refused(client):
    with pytest.raises(openai.APIStatusError) as caught:
        client.completions.create(model=MODEL, prompt=[1000] * 100_000, max_tokens=1)
    assert (caught.value.status_code, caught.value.code) == (400, "context_length_exceeded")
    assert "maximum context length is" in caught.value.message


def test_what_is_not_supported_is_refused_once(client):
    series = 'prima_requests_total{route="/v1/chat/completions",status="400"}'
    before = metrics().get(series, 0)
    retrying = client.with_options(max_retries=3)
    error = raised(openai.BadRequestError, retrying, functions=[{"name": "f", "parameters": {}}])
    assert (error.param, error.code) == ("functions", "unsupported_parameter")
    assert metrics()[series] == before + 1
