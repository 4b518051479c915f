"""The page in a real browser: what it shows is what the files say, and nothing of it is run."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.browser import Page, opened
from helpers.watched import BEGIN, Watch, append, iso, make_run, step_record

from drumline.cli.app import run_command

Start = Callable[..., Watch]
READY = "document.documentElement.dataset.ready === '1'"
HOSTILE = "<script>window.hit=1</script><img src=x onerror=window.hit=1>"


def chart(name: str, what: str) -> str:
    """x or y of what a chart has drawn."""
    return f"(charts.get({json.dumps(name)})?.lines ?? [{{x: [], y: []}}]).map((line) => line.{what})"


def is_clean(page: Page) -> bool:
    return page.errors == [] and [url for url in page.strangers() if not url.startswith("file:")] == []


def test_what_is_shown_is_what_the_records_say_and_new_ones_arrive(tmp_path: Path, watch: Start) -> None:
    run = make_run(tmp_path / "run", steps=300, state="running")
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [record for record in records if "loss" in record]
    with opened(watch(run).url) as page:
        page.wait_for(f"{READY} && charts.get('loss')?.plot && charts.get('mfu')?.plot")
        assert page.evaluate(chart("loss", "y")) == [
            [record["loss"] for record in losses],
            [record["valid_loss"] for record in records if "valid_loss" in record],
        ]
        assert page.evaluate(chart("lr", "y")) == [[record["lr"] for record in losses]]
        assert page.text("#tile-loss .value") == f"{losses[-1]['loss']:.4f}"
        assert page.text("#tile-valid .value") == f"{records[-1]['valid_loss']:.4f}"
        assert page.text("#tile-step .value") == "300" and page.text("#tile-mfu .value") == f"{losses[-1]['mfu']:.1%}"
        assert page.text("#samples-body pre").startswith("def the quick brown fox")
        page.wait_for("document.getElementById('live').textContent === 'live'")
        append(run / "metrics.jsonl", step_record(310, loss=1.2345))
        page.wait_for("document.querySelector('#tile-loss .value').textContent === '1.2345'")
        assert page.evaluate(chart("loss", "x"))[0][-1] == 310
        append(run / "samples.jsonl", {"step": 310, "prompt": "", "text": "fresh words"})
        page.wait_for("document.querySelector('#samples-body pre').textContent === 'fresh words'")
        assert is_clean(page)


def test_axes_log_smoothing_and_zoom_change_what_is_drawn(tmp_path: Path, watch: Start) -> None:
    run = make_run(tmp_path / "run", steps=3000)
    with opened(watch(run).url) as page:
        page.wait_for(f"{READY} && charts.get('loss')?.plot")
        page.click("[data-axis=tokens]")
        page.wait_for(f"{chart('loss', 'x')}[0].at(-1) === 3000 * 65536")
        page.click("[data-axis=time]")
        page.wait_for(f"Math.abs({chart('loss', 'x')}[0].at(-1) - 2990 * 0.36) < 1e-3")
        page.click("#log")
        page.wait_for("charts.get('loss')?.plot?.scales.y.distr === 3")
        page.evaluate("app.zoom([100, 200])")
        page.wait_for(f"{chart('loss', 'x')}[0].length < 40 && document.getElementById('reset')")
        assert page.evaluate("charts.get('loss').plot.scales.x.min") == 100
        page.click("#reset")
        page.wait_for(f"{chart('loss', 'x')}[0].length === 300")
        page.evaluate("smoothing.value = 0.9, smoothing.dispatchEvent(new Event('input'))")
        page.wait_for("charts.get('loss')?.lines.length === 3")
        assert is_clean(page)


def test_a_point_of_the_loss_leads_to_the_command_that_explains_it(tmp_path: Path, watch: Start) -> None:
    run = make_run(tmp_path / "a run", steps=300)
    with opened(watch(run).url) as page:
        page.wait_for(f"{READY} && charts.get('loss')?.plot")
        page.click("#loss .u-over")  # in its middle
        page.wait_for("document.querySelector('#loss .why').textContent")
        assert re.search(rf"drumline blame '{run}' --step 1[56]0 --losses", page.text("#loss .why"))
        assert is_clean(page)


def test_two_runs_are_compared_with_the_settings_in_which_they_differ(tmp_path: Path, watch: Start) -> None:
    make_run(tmp_path / "a", steps=100, lr=0.001)
    make_run(tmp_path / "b", steps=100, lr=0.004, seed=1)
    with opened(f"{watch(tmp_path).url}/?run=a", width=1300) as page:
        page.wait_for(f"{READY} && charts.get('loss')?.plot")
        page.click("#runs input[aria-label=b]")
        page.wait_for("!document.getElementById('differences').hidden && charts.get('loss')?.lines.length === 4")
        rows = page.evaluate("[...document.querySelectorAll('#differences tbody tr')].map((row) => row.innerText)")
        assert rows == ["lr\t0.001\t0.004", "seed\t0\t1"]
        assert page.evaluate("location.search") == "?run=a&run=b"
        assert is_clean(page)


def test_a_run_that_begins_while_the_page_is_open_appears(tmp_path: Path, watch: Start) -> None:
    with opened(watch(tmp_path).url) as page:
        page.wait_for(f"{READY} && document.getElementById('nothing')")
        assert "No runs here yet" in page.text("#nothing")
        make_run(tmp_path / "new", steps=50)
        page.wait_for("document.querySelector('h1')?.textContent === 'new'")
        assert is_clean(page)


@pytest.mark.parametrize("ranks", [1, 1024])
def test_one_rank_and_1024_ranks_are_drawn(tmp_path: Path, watch: Start, ranks: int) -> None:
    hosts = [f"node-{number}" for number in range(max(1, ranks // 8))]
    run = make_run(tmp_path / "run", steps=100, ranks=ranks, hosts=hosts, slow=700 if ranks > 1 else None)
    with opened(watch(run).url, width=1300) as page:
        page.wait_for(f"{READY} && document.getElementById('rank-heat')?.height")
        colours = """(id, part) => { const c = document.getElementById(id), g = c.getContext('2d');
          const all = g.getImageData(Math.round(c.width * part), 0, 1, c.height - 22).data, found = new Set();
          for (let i = 0; i < all.length; i += 4) found.add([all[i], all[i + 1], all[i + 2]].join());
          return [...found]; }"""
        assert page.evaluate(f"({colours})('rank-lanes', 0.2)")
        heat = page.evaluate(f"({colours})('rank-heat', 0.5)")
        if ranks > 1:
            assert len(heat) > 1 and page.text("#slow-ranks .chip").startswith("rank 700 · node-87")
            assert "1,024 ranks · 128 hosts" in page.text("#ranks-hint")
        assert page.evaluate("document.getElementById('rank-heat').clientHeight") < 900
        assert is_clean(page)


def test_events_tell_what_happened_and_why(tmp_path: Path, watch: Start) -> None:
    run = make_run(tmp_path / "run", steps=200)
    append(run / "events.jsonl", {"event": "never heard of", "time": iso(BEGIN + 500), "detail": 42})
    with opened(watch(run).url) as page:
        page.wait_for(f"{READY} && document.getElementById('events')")
        events = page.text("#events")
        assert "never heard of · detail 42" in events and "rank 1 · node-b: signal SIGKILL" in events
        page.click("#events summary")
        assert "in all_reduce" in page.text("#events pre") and "Traceback" in page.text("#events pre")
        useful = page.text("#tile-goodput .value")
        assert useful == page.text("#goodput b") and 0 < float(useful.rstrip("%")) < 100
        assert is_clean(page)


def test_hostile_text_is_shown_as_text(tmp_path: Path, watch: Start) -> None:
    name = "<img src=x onerror=hit=1>"
    run = make_run(tmp_path / name, steps=100, hosts=[HOSTILE])
    append(run / "samples.jsonl", {"step": 1, "prompt": HOSTILE, "text": HOSTILE})
    append(run / "events.jsonl", {"event": HOSTILE, "time": HOSTILE, "x": HOSTILE, "cause": {"trace": HOSTILE}})
    append(run / "metrics.jsonl", {"step": 100, "loss": 1.0, HOSTILE: 1.0})
    (run / "config.toml").write_text(f"[model]\npreset = '{HOSTILE}'\n['{HOSTILE}']\na = 1\n")
    (run / "data.json").write_text(json.dumps({"train": f"/{HOSTILE}/x", "sha256": HOSTILE}))
    assert run_command(["report", str(run)]) == 0
    for url in (watch(tmp_path).url, f"file://{tmp_path}/{name.replace('<', '%3C')}/report.html"):
        with opened(url) as page:
            page.wait_for(f"{READY} && charts.get('loss')?.plot")
            assert page.evaluate("typeof window.hit") == "undefined"
            assert page.text("h1") == name and HOSTILE in page.text("#samples-body pre")
            assert HOSTILE in page.text("#events") and HOSTILE in page.text("#about-body")
            assert page.evaluate("document.querySelectorAll('img, main script').length") == 0
            assert is_clean(page)


def test_a_phone_has_nothing_to_scroll_sideways(tmp_path: Path, watch: Start) -> None:
    make_run(tmp_path / "a-run-with-a-long-name-that-goes-on-and-on", steps=100, ranks=16)
    make_run(tmp_path / "b", steps=100)
    with opened(f"{watch(tmp_path).url}/?run=b", width=360, height=720) as page:
        page.wait_for(f"{READY} && charts.get('loss')?.plot && document.getElementById('rank-lanes')")
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        assert is_clean(page)


def test_language_and_colours_are_chosen_and_remembered(tmp_path: Path, watch: Start) -> None:
    url = watch(make_run(tmp_path / "run", steps=100)).url
    with opened(url, language="zh-CN") as page:
        page.wait_for(READY)
        assert page.text("#curves h2") == "曲线"
        page.click("#language")
        page.wait_for("document.querySelector('#curves h2').textContent === 'Curves'")
        paper = "getComputedStyle(document.body).backgroundColor"
        light = page.evaluate(paper)
        page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
        page.wait_for(f"{paper} !== {json.dumps(light)}")
        page.click("#theme")
        page.wait_for(f"{paper} === {json.dumps(light)}")
        page.go(url)
        page.wait_for(READY)
        assert page.text("#curves h2") == "Curves" and page.evaluate(paper) == light
        assert is_clean(page)


def test_every_word_of_the_page_is_there_in_both_languages(tmp_path: Path, watch: Start) -> None:
    with opened(watch(tmp_path).url) as page:
        words: dict[str, Any] = page.evaluate("WORDS")
        assert all(len(both) == 2 and all(both) for both in words.values())
        asked = page.evaluate("[...document.querySelectorAll('[data-t]')].map((each) => each.dataset.t)")
        assert set(asked) <= set(words)


def test_a_report_shows_the_run_without_any_server(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=300, ranks=4)
    out = tmp_path / "elsewhere/my report.html"
    assert run_command(["report", str(run), "-o", str(out)]) == 0
    losses = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    with opened(f"file://{out.parent}/my%20report.html") as page:
        page.wait_for(f"{READY} && charts.get('loss')?.plot && document.getElementById('rank-heat')")
        assert page.evaluate(chart("loss", "y"))[0] == [record["loss"] for record in losses if "loss" in record]
        page.click("[data-axis=tokens]")
        page.wait_for(f"{chart('loss', 'x')}[0].at(-1) === 300 * 65536")
        assert page.text("#command").startswith(f"drumline train --config {run}/config.toml --run_dir")
        assert "2.13.0" in page.text("#about-body") and page.text("#samples-body pre").startswith("def ")
        assert page.errors == [] and {url.partition(":")[0] for url in page.requests} <= {"file", "data"}
