"""A ring that serves, as clients see it. tests/tests/clients.rs starts the ring and says where it is."""

import os
import time
import urllib.request

import openai
import pytest

URL = os.environ["PRIMA_URL"]
MODEL = os.environ["PRIMA_MODEL"]
KEY = os.environ["PRIMA_KEY"]

# When it is imported, LiteLLM asks a server for prices, unless it is told to go by its own list.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

# Long enough for a slow machine, short enough to end a hang.
DEADLINE = 300


@pytest.fixture
def client():
    with openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0, timeout=DEADLINE) as client:
        yield client


@pytest.fixture
def model():
    return MODEL


@pytest.fixture
def chat(client):
    """chat(text, **options): a greedy chat of one message."""

    def ask(text, **options):
        messages = [{"role": "user", "content": text}]
        options = {"temperature": 0, "max_tokens": 24, **options}
        return client.chat.completions.create(model=MODEL, messages=messages, **options)

    return ask


def metrics():
    """Every sample of /metrics by its name and labels."""
    with urllib.request.urlopen(f"{URL}/metrics", timeout=DEADLINE) as answer:
        lines = answer.read().decode().splitlines()
    samples = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {series: float(value) for series, value in samples}


def wait_for(condition, what):
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {DEADLINE} s"
        time.sleep(0.02)
