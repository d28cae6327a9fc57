"""The page at `/`: a prompt, and its response as it is written, with what became of every draft.

One file, which fetches nothing but this server's own answers, and may not: see POLICY. It holds no data, so it needs no
key; what it asks for does.
"""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import HTMLResponse

PAGE = Path(__file__).with_name("page.html")
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; \
base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


def add_page(app: FastAPI) -> None:
    text = PAGE.read_text(encoding="utf-8")
    headers = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}

    @app.get("/", include_in_schema=False)
    async def page() -> HTMLResponse:
        return HTMLResponse(text, headers=headers)
