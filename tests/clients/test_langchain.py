"""LangChain, by its package for OpenAI's API."""

import pytest
from conftest import DEADLINE, KEY, MODEL, URL
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel

QUESTION = "Write one sentence about rivers."


@tool
def turn_light(on: bool) -> str:
    """Turn the light on or off."""
    return f"the light is {on}"


class River(BaseModel):
    """A river."""

    long: bool


@pytest.fixture
def llm():
    return ChatOpenAI(base_url=f"{URL}/v1", api_key=KEY, model=MODEL, temperature=0, max_tokens=24, max_retries=0, timeout=DEADLINE)


def test_a_stream_says_what_an_invocation_says(llm):
    whole = llm.invoke(QUESTION)
    assert whole.content and whole.usage_metadata["output_tokens"] == 24
    chunks = list(llm.stream(QUESTION))
    assert len(chunks) > 5 and "".join(chunk.content for chunk in chunks) == whole.content


def test_a_tool_is_called_and_its_result_sent_back(llm):
    messages = [HumanMessage("Turn the light on.")]
    bound = llm.bind_tools([turn_light], tool_choice="required", parallel_tool_calls=False).bind(max_tokens=100)
    called = bound.invoke(messages)
    (call,) = called.tool_calls
    assert call["name"] == "turn_light" and isinstance(call["args"]["on"], bool) and not called.invalid_tool_calls
    streamed = None
    for chunk in bound.stream(messages):
        streamed = chunk if streamed is None else streamed + chunk
    assert [(again["name"], again["args"]) for again in streamed.tool_calls] == [(call["name"], call["args"])]
    result = turn_light.invoke(call)
    assert isinstance(result, ToolMessage)
    assert llm.invoke([*messages, called, result]).content


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output_is_an_object_of_the_class(llm, method):
    longer = llm.model_copy(update={"max_tokens": 100})
    structured = longer.with_structured_output(River, method=method)
    assert isinstance(structured.invoke(QUESTION), River)


def test_texts_have_vectors():
    embeddings = OpenAIEmbeddings(base_url=f"{URL}/v1", api_key=KEY, model=MODEL, check_embedding_ctx_length=False, max_retries=0, timeout=DEADLINE)
    alike, again, other = embeddings.embed_documents(["a river", "a river", "Turn the light on."])
    assert alike == again != other and len(alike) == len(other) > 100
    assert embeddings.embed_query("a river") == alike
