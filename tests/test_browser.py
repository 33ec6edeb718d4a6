"""The report as a reader sees it, in headless Chromium."""

import shutil

import pytest
from selenium import webdriver
from selenium.webdriver import ActionChains
from selenium.webdriver.chrome.service import Service

from lastlayer.studies import networks, paper, three_samples
from lastlayer.studies.report import report

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    study = paper.run([0], budget=networks.Budget(max_epochs=300), bnn_epochs=100)
    (folder / "report.html").write_text(report([study], three_samples.fit(max_epochs=300)))
    return folder / "report.html"


@pytest.fixture
def browser(tmp_path):
    """Headless and quiet: no look-ups of its own, a profile of its own."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--disable-dev-shm-usage",
        "--window-size=1200,1600",
        f"--user-data-dir={tmp_path}",
    ):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    yield driver
    driver.quit()


def visible_band(browser) -> list[float]:
    return browser.execute_script(
        "const traces = document.getElementById('figure4')._fullData;"
        "return Array.from(traces.filter(t => t.fill === 'toself' && t.visible === true)[1].y)"
    )


def test_the_report_opens_without_errors_and_the_slider_moves_the_band(page, browser):
    browser.get(page.as_uri())
    errors = [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    assert not errors, errors
    assert browser.execute_script("return document.querySelectorAll('.js-plotly-plot').length") == 4
    reading = lambda: browser.execute_script("return document.getElementById('reading').textContent")
    before, band = reading(), visible_band(browser)
    assert "LPD test" in before
    rail = browser.find_element("css selector", "#figure4 .slider-rail-touch-rect")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", rail)
    ActionChains(browser).move_to_element_with_offset(rail, int(rail.size["width"] * 0.4), 0).click().perform()
    browser.execute_async_script("setTimeout(arguments[0], 1000)")
    assert reading() != before
    moved = visible_band(browser)
    assert len(moved) == len(band)
    assert max(abs(a - b) for a, b in zip(moved, band, strict=True)) > 0.1
    assert not [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]


def test_it_needs_nothing_from_outside(page, browser):
    browser.get(page.as_uri())
    resources = browser.execute_script("return performance.getEntriesByType('resource').map(r => r.name)")
    assert not [name for name in resources if name.startswith("http")], resources
