"""Texts as tokens, vectors and prompts: embeddings, and the routes that editors and llama.cpp's clients use."""

import base64
import json
import math
import struct
import urllib.error
import urllib.request

import ollama
import openai
import pytest
from conftest import DEADLINE, KEY, MODEL, URL

TEXTS = ["Rivers flow into the sea.", "A river runs to the ocean.", "The stock market fell on Monday."]


def post(route, **body):
    """The status and the JSON of a route that no client of OpenAI's has."""
    headers = {"Authorization": f"Bearer {KEY}"}
    request = urllib.request.Request(URL + route, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def likeness(one, other):
    return sum(a * b for a, b in zip(one, other, strict=True))


def test_embeddings_are_vectors_of_length_one(client, model):
    answer = client.embeddings.create(model=model, input=TEXTS)
    vectors = [item.embedding for item in answer.data]
    assert [item.index for item in answer.data] == [0, 1, 2]
    assert {len(vector) for vector in vectors} == {576}
    assert all(math.isclose(likeness(vector, vector), 1, abs_tol=1e-4) for vector in vectors)
    assert likeness(vectors[0], vectors[1]) > likeness(vectors[0], vectors[2])
    assert answer.usage.prompt_tokens == sum(len(post("/tokenize", content=text)[1]["tokens"]) for text in TEXTS)
    # The same text alone, which the client asks for as base64 unless told otherwise.
    alone = client.embeddings.create(model=model, input=TEXTS[1], encoding_format="float").data[0].embedding
    assert alone == pytest.approx(vectors[1], abs=1e-6)


def test_embeddings_come_as_base64_and_shorter(client, model):
    raw = client.embeddings.with_raw_response.create(model=model, input=TEXTS[0], encoding_format="base64", dimensions=64)
    text = json.loads(raw.content)["data"][0]["embedding"]
    vector = struct.unpack("<64f", base64.b64decode(text))
    assert likeness(vector, vector) == pytest.approx(1, abs=1e-4)
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model=model, input=TEXTS[0], dimensions=577)
    assert caught.value.param == "dimensions"


def test_ollama_embeds_what_openai_does(client, model):
    vectors = [item.embedding for item in client.embeddings.create(model=model, input=TEXTS[:2]).data]
    own = ollama.Client(host=URL, headers={"Authorization": f"Bearer {KEY}"}, timeout=DEADLINE)
    answer = own.embed(MODEL, TEXTS[:2])
    assert [pytest.approx(vector, abs=1e-6) for vector in answer.embeddings] == vectors
    assert len(own.embed(MODEL, TEXTS[0], dimensions=8).embeddings[0]) == 8
    with pytest.raises(ollama.ResponseError):
        own.embed(MODEL, "a " * 20_000, truncate=False)


def test_tokens_of_a_text_and_back(client, model):
    text = "Crabs 🦀 and octopuses <|im_end|>"
    status, tokenized = post("/tokenize", content=text)
    assert status == 200 and all(isinstance(token, int) for token in tokenized["tokens"])
    assert post("/detokenize", tokens=tokenized["tokens"]) == (200, {"content": "Crabs 🦀 and octopuses "})
    _, whole = post("/tokenize", content=text, parse_special=False, with_pieces=True)
    pieces = [piece["piece"] for piece in whole["tokens"]]
    assert b"".join(bytes(piece) if isinstance(piece, list) else piece.encode() for piece in pieces).decode() == text
    # Its tokens are a prompt like the text itself.
    ask = {"model": model, "temperature": 0, "max_tokens": 8}
    tokens = post("/tokenize", content="Once upon a time")[1]["tokens"]
    said = [client.completions.create(prompt=prompt, **ask).choices[0].text for prompt in ("Once upon a time", tokens)]
    assert said[0] == said[1]


def test_the_prompt_of_a_chat_is_told(client, chat, model):
    messages = [{"role": "user", "content": "hello"}]
    status, told = post("/apply-template", messages=messages)
    assert status == 200
    assert told["prompt"].endswith("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")
    completed = client.completions.create(model=model, prompt=told["prompt"], temperature=0, max_tokens=8)
    assert completed.choices[0].text == chat("hello", max_tokens=8).choices[0].message.content


def test_an_answer_goes_on_with_what_the_model_said_last(client, model):
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "Hello! Rivers are"}]
    prompt = post("/apply-template", messages=messages)[1]["prompt"]
    assert prompt.endswith("<|im_start|>assistant\nHello! Rivers are")
    ask = {"model": model, "temperature": 0, "max_tokens": 8}
    said = client.chat.completions.create(messages=messages, **ask).choices[0].message.content
    assert said == client.completions.create(prompt=prompt, **ask).choices[0].text
    anew = client.chat.completions.create(messages=messages, extra_body={"continue_final_message": False}, **ask)
    assert anew.choices[0].message.content != said


def test_what_this_model_was_not_trained_for_is_said():
    status, answer = post("/v1/rerank", query="rivers", documents=TEXTS)
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert "rank" in answer["error"]["message"]
    status, answer = post("/infill", input_prefix="def f():", input_suffix="return x")
    assert status == 400 and "middle" in answer["error"]["message"]
