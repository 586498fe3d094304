"""How many requests an engine has, by whichever endpoint it says so."""

from http import HTTPStatus

import httpx


def num_requests(url: str, token: str, *, timeout_s: float = 5) -> int | None:
    """Requests that run or wait in an engine; None if it does not say so within `timeout_s`."""
    with httpx.Client(
        base_url=url,
        headers={"Authorization": f"Bearer {token}"},
        timeout=timeout_s,
        trust_env=False,  # a site's HTTP proxy must not see traffic between our own nodes
    ) as http:
        try:
            answer = http.get("/v1/loads", params={"include": "core"})
            if answer.status_code == HTTPStatus.NOT_FOUND:  # ours, and SGLang before 0.5.1x
                loads = [http.get("/server_info").raise_for_status().json()]
            else:
                loads = answer.raise_for_status().json()["loads"]
            return sum(int(e["num_running_reqs"]) + int(e["num_waiting_reqs"]) for e in loads)
        except (httpx.HTTPError, ValueError, KeyError):
            return None
