"""The exchanges of a request for the log, as tokens: the engine has them, asked for or not."""

from __future__ import annotations

from draftsmith.inference.requests.request import Request
from draftsmith.inference.requests.response import Response
from draftsmith.inference.server.engine_thread import Ticket
from draftsmith.inference.server.protocol import ChatRequest, GenerationRequest
from draftsmith.inference.traffic_log.asked import asked_sampling, asked_template
from draftsmith.inference.traffic_log.records import LoggedExchange


def exchanges_of(
    time: float, model: str, request: GenerationRequest, ticket: Ticket
) -> list[LoggedExchange]:
    """One for each response in which anything was written. `time`: of the request's arrival, in
    seconds since 1970. `model`: the name in the answer."""
    body = request.model_dump(exclude_unset=True)
    chat = isinstance(request, ChatRequest)
    exchanges = []
    for _, response in sorted(ticket.begun.items()):
        texts = _texts(response)
        for writing in response.requests:
            if not writing.output_token_ids:
                continue
            exchanges.append(
                LoggedExchange(
                    time=time,
                    model=model,
                    messages=body["messages"] if chat else None,
                    chat_template_kwargs=asked_template(body) if chat else {},
                    prompt=None if chat else response.prompt,
                    prompt_token_ids=response.prompt_token_ids,
                    text=texts.get(writing.index),
                    token_ids=writing.output_token_ids,
                    finish_reason=writing.finish_reason,
                    sampling=asked_sampling(body),
                    spec_decode=writing.counters if _drafted(writing) else None,
                )
            )
    return exchanges


def _texts(response: Response) -> dict[int, str]:
    """By index of the request. Of a response whose client has left, the engine may still write."""
    if not response.finished:
        return {}
    return {completion.index: completion.text for completion in response.output().outputs}


def _drafted(writing: Request) -> bool:
    return writing.counters.num_drafts > 0
