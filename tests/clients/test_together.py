"""Many clients at once, and clients that leave."""

import asyncio

import openai
import pytest

from conftest import DEADLINE, KEY, MODEL, URL, metrics, wait_for

RUNNING = "prima_requests_running"
CANCELLED = 'prima_generations_total{outcome="cancelled"}'

SUBJECTS = [
    "rivers", "bread", "the moon", "a cat", "winter", "trains", "glass", "music",
    "salt", "a bridge", "bees", "paper", "the sea", "a clock", "iron", "gardens",
]


def options(subject, **more):
    messages = [{"role": "user", "content": f"Write a short story about {subject}."}]
    return {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 24, **more}


def test_sixteen_at_once_are_answered_as_alone(client):
    alone = [client.chat.completions.create(**options(subject)).choices[0].message.content for subject in SUBJECTS]
    assert len(set(alone)) > 8, "the answers differ, or the comparison says nothing"

    async def streamed(client, subject):
        text = ""
        async for chunk in await client.chat.completions.create(**options(subject, stream=True)):
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
        return text

    async def together():
        # A ring that is full says when to come again, and the client does.
        async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=20, timeout=DEADLINE) as client:
            return await asyncio.gather(*(streamed(client, subject) for subject in SUBJECTS))

    assert asyncio.run(together()) == alone
    wait_for(lambda: metrics()[RUNNING] == 0, "the requests are over")


def test_a_stream_that_its_client_closes_is_cancelled(client):
    before = metrics().get(CANCELLED, 0)
    stream = client.chat.completions.create(**options("a very long journey", stream=True, max_tokens=2000))
    for _, chunk in zip(range(4), stream):
        assert chunk.choices[0].finish_reason is None
    wait_for(lambda: metrics()[RUNNING] == 1, "the request runs")
    stream.close()
    wait_for(lambda: metrics()[RUNNING] == 0, "the request is over")
    assert metrics()[CANCELLED] == before + 1


def test_a_client_that_leaves_before_its_answer_is_cancelled():
    before = metrics().get(CANCELLED, 0)

    async def leave():
        async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0, timeout=DEADLINE) as client:
            asked = asyncio.create_task(client.chat.completions.create(**options("a very long war", max_tokens=2000)))
            await asyncio.to_thread(wait_for, lambda: metrics()[RUNNING] == 1, "the request runs")
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked

    asyncio.run(leave())
    wait_for(lambda: metrics()[RUNNING] == 0, "the request is over")
    assert metrics()[CANCELLED] == before + 1
