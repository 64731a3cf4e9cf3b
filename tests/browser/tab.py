"""A tab of the browser, the views of the page, and the plan of the run that they show."""

from __future__ import annotations

from typing import Any

from playwright.sync_api import Browser, Page, expect

from tests.serving import RunningServer

PLAN: dict[str, Any] = {
    "seq_len": 64,
    "seed": 3,
    "stages": [
        {"from_step": 0, "global_batch_size": 8, "mixture": {"docs": 0.75, "hostile": 0.25}},
        {"from_step": 40, "global_batch_size": 12, "mixture": {"docs": 0.5, "hostile": 0.5}},
    ],
}
RUN = "gpt2-124m.a"
SECONDS = 30_000  # milliseconds; a loaded machine is slow
VIEWS = {
    "corpora": "/",
    "corpus": "/page/corpora/docs?document=2",
    "view": "/page/corpora/chosen",
    "plans": "/page/plans",
    "viewed": "/page/plans/{whole}/diff/{viewed}",
    "plan": "/page/plans/{plan}",
    "new": "/page/plans/new",
    "step": "/page/plans/{plan}/steps/41",
    "skimmed": "/page/plans/{plan}/steps/39?until=41",
    "diff": "/page/plans/{plan}/diff/{other}",
    "lookup": "/page/lookup?plan={plan}&corpus=docs&document=2",
    "recordings": "/page/recordings",
    "recording": "/page/recordings/run%201",
    "reports": "/page/reports",
    "report": "/page/reports/%3Cb%3Ebench%20mark",
    "live": "/page/live",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class Opened:
    """A view in a tab, and what went wrong there."""

    def __init__(self, browser: Browser, server: RunningServer, width: int = 1280, **options: Any) -> None:
        self.context = browser.new_context(viewport={"width": width, "height": 800}, **options)
        self.page: Page = self.context.new_page()
        self.page.set_default_timeout(SECONDS)
        expect.set_options(timeout=SECONDS)
        self.url = server.url
        self.problems: list[str] = []
        self.page.on("console", lambda message: self.problems.append(f"console: {message.text}"))
        self.page.on("pageerror", lambda error: self.problems.append(f"error: {error}"))
        self.page.on("request", self._check_request)

    def reset(self) -> None:
        """Leave the view, and be as a new tab, which would start a process: a second of CPU."""
        self.page.evaluate("sessionStorage.clear()")
        self.page.goto("about:blank")
        self.page.set_viewport_size({"width": 1280, "height": 800})
        self.page.emulate_media(color_scheme="light")
        self.problems.clear()

    def _check_request(self, request: Any) -> None:
        if not request.url.startswith((self.url, "data:")):
            self.problems.append(f"request: {request.url}")

    def show(self, address: str) -> Page:
        """Open a view, until each part of it has its data; one that follows the server is never idle."""
        response = self.page.goto(self.url + address)
        assert response is not None
        assert response.headers["content-security-policy"] == POLICY
        if address == VIEWS["live"]:
            expect(self.page.locator("#state")).to_have_text("live")
        else:
            self.page.wait_for_load_state("networkidle")
        return self.page
