"""The page of trajectories in a real browser, which a response of the model tries to take over."""

import html
import json
import re
import shutil
import subprocess
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import numpy as np
import pytest
from viewer_runs import empty_run, put, said

from relax_hpc.runs.viewer import GroupQuery, output
from relax_hpc.runs.viewer.run import RunViewer

CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(CHROMIUM is None, reason="needs the package chromium"),
]
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-dev-shm-usage",
    "--no-first-run", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--no-proxy-server", "--disable-extensions", "--window-size=1400,900",
]  # fmt: skip
RESPONSES = (
    '<script>document.title = "taken"</script>',
    '</pre></script></style><script>document.title = "taken"</script>',
    '<img src="{url}/image" onerror="document.title = \'taken\'">',
    '"><svg onload="document.title = \'taken\'"><!--',
    "</b><b style='background:url({url}/style)'>",
    "<base href='{url}/'><iframe src='{url}/frame'></iframe><link rel=stylesheet href='{url}/css'>",
    "abc\u202edcb\u2066 \u200f\u061c\x00\x1b[2J\x7f end",
    "{{{{ 7 * 7 }}}} {{% raw %}} &lt;b&gt; &amp;",
)


@pytest.fixture(scope="module")
def listener():
    """A server on this machine, and what it was asked for."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_error(404)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny_model, listener):
    run = empty_run(tmp_path_factory.mktemp("browser") / "run", tiny_model)
    responses = [text.format(url=listener[0]) for text in RESPONSES]
    put(run, [said(text, 0, s, prompt=text, reward=0) for s, text in enumerate(responses)])
    put(run, [said("x" * 90_000, 1, s, reward=1) for s in range(2)])
    columns = {"rollout_logprobs": np.full(8, -0.5, np.float32)}
    put(run, [said("half", 2, s, reward=s, version=s, columns=columns) for s in range(2)])
    return run


def page_of(run, **asked):
    sight = RunViewer(run.root)
    found = sight.view(GroupQuery(**asked), 4000)
    head = output.PageHeader("run", "logprob", found.remarks, sight.solved_at)
    output.write(run.view, head, found.groups, in_run=True)
    return run.view


def dom(path, tmp_path):
    """The document as the browser has it once scripts have run."""
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path}/profile", "--dump-dom", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "<html" in done.stdout, done.stderr[-2000:]
    return done.stdout


def asks(source, script):
    """The page with a script at its end which leaves what it finds in the title, as JSON."""
    nonce = re.search('nonce="([^"]+)"', source)[1]
    ours = f'<script nonce="{nonce}">document.title = JSON.stringify({script})</script>'
    return source.replace("</body>", f"{ours}</body>")


def answer_of(path, tmp_path):
    return json.loads(html.unescape(re.search("<title>(.*?)</title>", dom(path, tmp_path))[1]))


def test_responses_that_attack_the_page_are_text_and_nothing_is_asked_for(run, tmp_path, listener):
    url, asked = listener
    script = """{
      title: document.title,
      texts: [...document.querySelectorAll("#group-0 article")].map(
        each => [...each.children].pop().textContent),
      prompt: document.querySelector("#group-0 .prompt").textContent,
      odd: document.querySelectorAll("img, svg, iframe, base, link, [onerror], [style]").length,
      scripts: document.scripts.length,
      long: document.querySelector("#group-1 article > pre").textContent.length,
    }"""
    path = tmp_path / "page.html"
    path.write_text(asks(page_of(run).read_text(), script))
    found = answer_of(path, tmp_path)
    texts = [text.format(url=url) for text in RESPONSES]
    texts[6] = "abc\ufffddcb\ufffd \ufffd\ufffd\u2400\u241b[2J\ufffd end"
    assert found["texts"] == texts and found["prompt"] == texts[0]
    assert found["title"] == "run: trajectories" and found["odd"] == 0
    assert found["scripts"] == 2, "of the page, and of this test"
    assert found["long"] == 4000 + len(" [... 86000 tokens ...] ")
    assert asked == []


def test_what_is_not_escaped_is_still_stopped_by_the_policy_of_the_page(run, tmp_path, listener):
    url, asked = listener
    source = page_of(run, guid=2).read_text()
    attack = "".join(text.format(url=url) for text in (RESPONSES[2], RESPONSES[4], RESPONSES[5]))
    bare = re.sub("<meta http-equiv[^>]*>", "", source)
    for name, text in (("guarded", source), ("bare", bare)):
        (tmp_path / name).with_suffix(".html").write_text(text.replace("<main>", f"<main>{attack}"))
    assert "<title>run: trajectories" in dom(tmp_path / "guarded.html", tmp_path)
    assert asked == []
    assert "<title>taken" in dom(tmp_path / "bare.html", tmp_path)
    assert "/image" in asked
    asked.clear()


def test_a_search_finds_texts_a_part_sorts_and_an_address_leads_to_its_group(run, tmp_path):
    parts = [{"a": 0.0, "b": 1.0}, {"a": 2.0, "b": 0.0}]
    put(run, *([said(f"So: {guid}", guid, reward=1, parts=parts[guid % 2])] for guid in (4, 5)))
    script = """(() => {
      const there = () => sections.filter(each => !each.hidden).map(each => each.id).join(" ");
      const first = () => document.querySelector("section").id;
      const at = document.querySelector(".now").id;
      search.value = "sO: 5"; search.oninput();
      const found = [there(), document.getElementById("found").textContent];
      search.value = ""; search.oninput();
      part.value = "most b"; part.onchange();
      const most = first();
      part.value = "least b"; part.onchange();
      return [at, ...found, most, first()];
    })()"""
    path = tmp_path / "page.html"
    source = page_of(run).read_text()
    path.write_text(
        asks(
            source.replace("onhashchange();", 'location.hash = "group-4"; onhashchange();'), script
        )
    )
    assert answer_of(path, tmp_path) == ["group-4", "group-5", "1 of 5", "group-4", "group-5"]
